import intel_extension_for_pytorch as ipex
import torch
from program_models import layers

model = layers(32, 64, 8)
data = torch.rand(16, 32)
expected = model(data)

assert ipex.cpu.runtime.is_runtime_ext_enabled()
cpu_pool = ipex.cpu.runtime.CPUPool(node_id=0)
with torch.no_grad():
    traced = torch.jit.freeze(torch.jit.trace(model, data))

    with ipex.cpu.runtime.pin(cpu_pool):
        torch.testing.assert_close(traced(data), expected)

    @ipex.cpu.runtime.pin(cpu_pool)
    def run(x):
        return traced(x)

    torch.testing.assert_close(run(data), expected)

    task = ipex.cpu.runtime.Task(traced, cpu_pool)
    torch.testing.assert_close(task(data).get(), expected)
    torch.testing.assert_close(task.run_sync(data), expected)

    streams = ipex.cpu.runtime.get_default_num_streams(cpu_pool)
    module = ipex.cpu.runtime.MultiStreamModule(traced, num_streams=streams, cpu_pool=cpu_pool)
    assert module.get_stream_number() == streams
    torch.testing.assert_close(module(data), expected)

    hint = ipex.cpu.runtime.MultiStreamModuleHint(0)
    module = ipex.cpu.runtime.MultiStreamModule(
        traced, cpu_pool=cpu_pool, input_split_hint=hint, output_concat_hint=hint
    )
    outputs = module(data)
