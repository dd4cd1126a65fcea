import intel_extension_for_pytorch as ipex
import torch
from intel_extension_for_pytorch.quantization import convert, prepare
from program_models import language_model

model = language_model("BertModel")
data = torch.randint(128, size=[2, 16])
with torch.no_grad():
    expected = model(data).last_hidden_state

dynamic_qconfig = ipex.quantization.default_dynamic_qconfig
prepared_model = prepare(model, dynamic_qconfig, example_inputs=data)
converted_model = convert(prepared_model)
with torch.no_grad():
    outputs = converted_model(data).last_hidden_state
