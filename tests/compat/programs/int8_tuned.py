import intel_extension_for_pytorch as ipex
import torch
from program_models import layers

model = layers(64, 128, 8)
data = torch.rand(32, 64)
expected = model(data)
labels = expected.argmax(1)
calib_dataloader = [(torch.rand(32, 64), labels) for _ in range(3)]


def eval_func(model):
    with torch.no_grad():
        return (model(data).argmax(1) == labels).float().mean().item()


prepared = ipex.quantization.prepare(
    model, ipex.quantization.default_static_qconfig_mapping, example_inputs=data
)
tuned = ipex.quantization.autotune(
    prepared,
    calib_dataloader,
    eval_func=eval_func,
    sampling_sizes=[3],
    accuracy_criterion={"relative": 0.1},
    tuning_time=0,
)
with torch.no_grad():
    outputs = ipex.quantization.convert(tuned)(data)
