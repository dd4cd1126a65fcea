# %% [markdown]
# # A language model from a checkpoint to a server
#
# Load a checkpoint, quantize it to 4 bits, generate, save it to one file, serve the file, and ask
# it by OpenAI's client. `examples/language_model_server.py` is the same as a program. Needs
# `pip install 'oxytorch[serve]' openai`.

# %%
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

import oxytorch

disable_progress_bar()
print(oxytorch.__version__, torch.__version__, oxytorch.isa.active())

# %% [markdown]
# ## A checkpoint
#
# A folder in Hugging Face's format. This one is made here, with random weights, so its text is
# noise; name a folder of yours in its place.

# %%
sys.path.insert(0, str(Path.cwd().parent))
from small_checkpoint import write_checkpoint

scratch = tempfile.TemporaryDirectory()
folder = write_checkpoint(Path(scratch.name) / "small")
print(*sorted(path.name for path in folder.iterdir()))

# %% [markdown]
# ## 4 bits

# %%
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder).eval()
plain = sum(parameter.nbytes for parameter in model.parameters())
model = oxytorch.llm.optimize(model, weights="int4", inplace=True)
print(str(oxytorch.explain(model)).splitlines()[0])

# %%
prompt = torch.tensor([tokenizer("Once upon a time")["input_ids"]])
tokens = oxytorch.llm.generate(model, prompt, max_new_tokens=12)
own = tokenizer.decode(tokens[0, prompt.shape[1] :])
print(repr(own))

# %% [markdown]
# ## One file

# %%
file = Path(scratch.name) / "model.oxy"
oxytorch.save(model, file)
print(f"float32 {plain / 1024:.0f} KiB, {file.name} {file.stat().st_size / 1024:.0f} KiB")

# %% [markdown]
# ## A server
#
# In a terminal: `oxytorch serve model.oxy --tokenizer FOLDER`. Here it is a process beside the
# notebook, on a free port, which its log names once the model is ready.

# %%
command = [sys.executable, "-m", "oxytorch", "serve", str(file), "--tokenizer", str(folder)]
server = subprocess.Popen([*command, "--port", "0"], stderr=subprocess.PIPE, text=True)
events = (json.loads(line) for line in server.stderr if line.startswith("{"))
address = next(event["url"] for event in events if event["event"] == "ready")

# %%
import openai

client = openai.OpenAI(base_url=f"{address}/v1", api_key="none")
answer = client.completions.create(
    model="model", prompt="Once upon a time", max_tokens=12, temperature=0
)
print(repr(answer.choices[0].text))
print(answer.usage.prompt_tokens, "tokens read,", answer.usage.completion_tokens, "written")

# %% [markdown]
# The server's greedy text is that of `llm.generate` in this process.

# %%
assert answer.choices[0].text == own
server.terminate()
server.communicate()
scratch.cleanup()
