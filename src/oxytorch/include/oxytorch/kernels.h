/* Kernels of oxytorch over plain memory, without libtorch: for programs that link
 * liboxytorch_kernels.so (in CMake: oxytorch::kernels). Plain C.
 *
 *   int64_t bytes = oxytorch_kernels_packed_bytes(OXYTORCH_FLOAT32, 1024, 256);
 *   void* packed = aligned_alloc(64, bytes);
 *   oxytorch_kernels_pack(OXYTORCH_FLOAT32, weight, 1024, 256, packed);
 *   oxytorch_kernels_linear(OXYTORCH_FLOAT32, x, rows, 256, OXYTORCH_FLOAT32, packed, 1024, bias,
 *                           "gelu", NULL, out);
 *
 * Matrices are contiguous, row by row. Sums are float32. Nothing is kept from call to call but
 * threads; any number of threads may call at once. A function that returns int returns 1, or 0
 * where it fails, with nothing written, and oxytorch_kernels_error tells the calling thread why.
 * `out` must not overlap what is read.
 */
#ifndef OXYTORCH_KERNELS_H
#define OXYTORCH_KERNELS_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Grows when a function changes. A program that was compiled for 1 runs with a library of which
 * oxytorch_kernels_abi() is 1. Functions are added without a change. */
#define OXYTORCH_KERNELS_ABI 1
int oxytorch_kernels_abi(void);

typedef enum { OXYTORCH_FLOAT32 = 0, OXYTORCH_BFLOAT16 = 1, OXYTORCH_FLOAT16 = 2 } OxytorchDtype;

/* Why the last call of this thread failed: "linear: expected ..., got ...". */
const char* oxytorch_kernels_error(void);

/* The level of instruction set that kernels run at on this processor, such as "avx512_bf16". */
const char* oxytorch_kernels_level(void);

/* Threads among which a call is split; at first one for each processor that this process may use.
 * A call that finds them at work for another one runs on its own thread. */
int oxytorch_kernels_set_threads(int threads);
int oxytorch_kernels_threads(void);

/* Bytes of a weight [out_features, in_features] once it is packed, or 0 where it fails. dtype:
 * float32 or bfloat16. The order of packed weights belongs to a version of the library. */
int64_t oxytorch_kernels_packed_bytes(OxytorchDtype dtype, int64_t out_features,
                                      int64_t in_features);

/* Packs a weight. packed: as many bytes, which begin at a multiple of 64. */
int oxytorch_kernels_pack(OxytorchDtype dtype, const void* weight, int64_t out_features,
                          int64_t in_features, void* packed);

/* out[rows, out_features] = epilogue(x[rows, in_features] weight^T + bias).
 *
 * dtype: of x, bias, other and out; packed_dtype: that of `pack`. bias: [out_features], or NULL.
 * epilogue: "none", "relu", "gelu", "gelu_tanh", "silu", ..., or "add", "add_relu", "relu_add" and
 * so on, which add other[rows, out_features]; NULL is "none". other: NULL with all others. */
int oxytorch_kernels_linear(OxytorchDtype dtype, const void* x, int64_t rows, int64_t in_features,
                            OxytorchDtype packed_dtype, const void* packed, int64_t out_features,
                            const void* bias, const char* epilogue, const void* other, void* out);

/* Normalizes each row of x[rows, width]. weight, bias: [width], of x's dtype, or NULL. */
int oxytorch_kernels_layer_norm(OxytorchDtype dtype, const void* x, int64_t rows, int64_t width,
                                const void* weight, const void* bias, double eps, void* out);
int oxytorch_kernels_rms_norm(OxytorchDtype dtype, const void* x, int64_t rows, int64_t width,
                              const void* weight, double eps, void* out);

/* softmax(scale x) of each row of x[rows, width]. */
int oxytorch_kernels_softmax(OxytorchDtype dtype, const void* x, int64_t rows, int64_t width,
                             double scale, void* out);

/* softmax(scale query key^T) value for each batch and head. query: [batch, heads, queries, width];
 * key, value: [batch, heads, keys, width]; out: [batch, queries, heads, width], as the layer that
 * follows takes it. is_causal: query i sees keys up to i. */
int oxytorch_kernels_attention(OxytorchDtype dtype, const void* query, const void* key,
                               const void* value, int64_t batch, int64_t heads, int64_t queries,
                               int64_t keys, int64_t width, double scale, int is_causal, void* out);

#ifdef __cplusplus
}
#endif

#endif
