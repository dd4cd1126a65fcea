import intel_extension_for_pytorch as ipex
import torch
from intel_extension_for_pytorch.quantization import convert, prepare


class Recurrent(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = torch.nn.LSTM(32, 64, batch_first=True)
        self.head = torch.nn.Linear(64, 16)

    def forward(self, x):
        return self.head(self.lstm(x)[0])


model = Recurrent().eval()
data = torch.rand(2, 8, 32)
expected = model(data)

dynamic_qconfig = ipex.quantization.default_dynamic_qconfig_mapping
prepared_model = prepare(model, dynamic_qconfig, example_inputs=data)
converted_model = convert(prepared_model)
with torch.no_grad():
    outputs = converted_model(data)
