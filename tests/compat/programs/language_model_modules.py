import intel_extension_for_pytorch as ipex
import torch
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

config = LlamaConfig(
    hidden_size=64,
    intermediate_size=128,
    num_attention_heads=4,
    num_key_value_heads=2,
    attn_implementation="sdpa",
)
stock = LlamaDecoderLayer(config, 0).eval()
hidden = torch.randn(1, 12, 64)
cos, sin = LlamaRotaryEmbedding(config)(hidden, torch.arange(12)[None])
with torch.no_grad():
    expected = stock(hidden, position_embeddings=(cos, sin))


class Layer(torch.nn.Module):
    """A decoder layer, as models were written over ipex.llm."""

    def __init__(self, stock):
        super().__init__()
        attention, mlp = stock.self_attn, stock.mlp
        self.q, self.k, self.v = attention.q_proj, attention.k_proj, attention.v_proj
        self.norm = ipex.llm.modules.RMSNorm(64, 1e-6, stock.input_layernorm.weight)
        self.out = ipex.llm.modules.LinearAdd(attention.o_proj)
        self.gated = ipex.llm.modules.Linear2SiluMul(mlp.gate_proj, mlp.up_proj)
        self.down = ipex.llm.modules.LinearAdd(mlp.down_proj)
        self.weight = stock.post_attention_layernorm.weight

    def forward(self, hidden, cos, sin):
        normed = self.norm(hidden)
        heads = [layer(normed).view(1, 12, -1, 16) for layer in (self.q, self.k, self.v)]
        query, key = ipex.llm.functional.rotary_embedding(heads[0], heads[1], sin, cos, 16, True)
        query, key, value = (each.transpose(1, 2) for each in (query, key, heads[2]))
        found = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True
        )
        hidden = self.out(found.transpose(1, 2).reshape(1, 12, 64), hidden)
        normed = ipex.llm.functional.rms_norm(hidden, self.weight, 1e-6)
        return self.down(self.gated(normed), hidden)


with torch.no_grad():
    outputs = Layer(stock)(hidden, cos, sin)
