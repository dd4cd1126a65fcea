import io
import os
import tempfile
import warnings

import torch
from intel_extension_for_pytorch.quantization import convert, prepare
from program_models import layers
from torch.ao.quantization import MinMaxObserver, PerChannelMinMaxObserver, QConfig

model = layers(64, 128, 64)
data = torch.rand(8, 64)
expected = model(data)

qconfig = QConfig(
    activation=MinMaxObserver.with_args(qscheme=torch.per_tensor_affine, dtype=torch.quint8),
    weight=PerChannelMinMaxObserver.with_args(
        dtype=torch.qint8, qscheme=torch.per_channel_symmetric
    ),
)
prepared = prepare(model, qconfig, example_inputs=data)
with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
    prepared(torch.rand(32, 64))
    path = os.path.join(folder, "configure.json")
    prepared.save_qconf_summary(qconf_summary=path)
    prepared.load_qconf_summary(qconf_summary=path)
    converted = convert(prepared)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.freeze(torch.jit.trace(converted, data))
    buffer = io.BytesIO()
    torch.jit.save(traced, buffer)
    buffer.seek(0)
    outputs = torch.jit.load(buffer)(data)
