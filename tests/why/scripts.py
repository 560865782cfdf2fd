"""Small scripts: most with one planted fault, some with three, and the `healthy_` ones with none."""

BEGIN = """
import sys
import torch
from transformers import AutoModelForCausalLM

def load(dtype="auto", **options):
    return AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=dtype, **options)

def prompts(rows, tokens):
    return torch.randint(3, 900, (rows, tokens))
"""


def forwards(times: int, rows: int, tokens: int) -> str:
    """A loop of forwards, each of other prompts."""
    return f"""
with torch.no_grad():
    for _ in range({times}):
        logits = model(prompts({rows}, {tokens}), logits_to_keep=1).logits
"""


BODIES = {
    # Writes a few lines about a prompt, with a flag left over from fine-tuning.
    "cache_off": """
model, prompt = load(), prompts(2, 96)
for _ in range(2):
    model.generate(prompt, max_new_tokens=16, do_sample=False, use_cache=False)
""",
    # Greedy decoding by hand, as in a first tutorial: each step computes all earlier tokens again.
    "loop_without_cache": """
model, ids = load(), prompts(2, 128)
with torch.no_grad():
    past = None
    for _ in range(16):
        logits = model(ids, logits_to_keep=1).logits
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=-1)
""",
    # Scores batches of texts by their likelihood, and records gradients that it does not use.
    "gradients": """
model, scores = load(), []
with torch.enable_grad():
    for _ in range(240):
        ids = prompts(4, 6)
        scores.append(float(model(ids, labels=ids).loss))
""",
    # Answers after some fine-tuning: the model is still in train mode.
    "train_mode": "model = load(attention_dropout=0.1).train()" + forwards(4, 2, 384),
    # First words for many short texts, with frozen weights as before fine-tuning.
    "frozen": """
model = load()
model.requires_grad_(False)
with torch.inference_mode():
    for _ in range(8):
        words = model(prompts(16, 8), logits_to_keep=1).logits.argmax(-1)
""",
    # Short questions, each padded to the model's maximum.
    "padded_to_the_maximum": """
model = load()
length = 384
for _ in range(3):
    ids = prompts(4, length)
    mask = torch.zeros_like(ids)
    mask[:, -48:] = 1
    model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=4, do_sample=False)
""",
    # Loads a 16-bit checkpoint in float32, as older examples do.
    "float32": "model = load(torch.float32)" + forwards(4, 4, 256),
    # A hand-written loop with a cache, whose prompt computes the logits of every position.
    "all_logits": """
model = load()
with torch.inference_mode():
    for _ in range(5):
        found = model(prompts(4, 256), use_cache=True)
        for _ in range(2):
            token = found.logits[:, -1:].argmax(-1)
            found = model(token, past_key_values=found.past_key_values)
""",
    # Eight questions, one after the other.
    "one_by_one": """
model, questions = load(), prompts(8, 24)
for question in questions.split(1):
    model.generate(question, max_new_tokens=12, do_sample=False)
""",
    # Eight questions, each with a call of continuous batching of its own.
    "paged_one_by_one": """
from transformers import ContinuousBatchingConfig, GenerationConfig
model = load()
generation = GenerationConfig(max_new_tokens=12, do_sample=False, eos_token_id=-1, pad_token_id=0)
batching = ContinuousBatchingConfig(page_size=32, num_blocks=64, max_batch_tokens=256)
questions = prompts(8, 24).tolist()
for batch in [[question] for question in questions]:
    model.generate_batch(batch, generation_config=generation, continuous_batching_config=batching)
""",
    # A low-rank adapter next to every linear, as after fine-tuning, is never merged.
    "adapters": """
from functools import partial
from planted_faults import LowRank, with_linears
model = with_linears(load(), partial(LowRank, rank=64))
for _ in range(3):
    model.generate(prompts(2, 16), max_new_tokens=32, do_sample=False)
""",
    # A model card once said that attention must be eager.
    "eager_attention": 'model = load(attn_implementation="eager")' + forwards(4, 2, 768),
    # Beam search, copied from a translation example.
    "beams": """
model = load()
for _ in range(3):
    model.generate(prompts(2, 64), max_new_tokens=12, num_beams=5)
""",
    # Stops once the answer repeats itself, and reads the whole answer after every token.
    "stops_on_repeats": """
import difflib
from transformers import StoppingCriteria

class Repeats(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        found = []
        for row in input_ids.tolist():
            cuts = range(40, len(row), 20)
            pairs = (difflib.SequenceMatcher(None, row[:cut], row[cut:], autojunk=False) for cut in cuts)
            found.append(max(pair.ratio() for pair in pairs) > 0.99)
        return torch.tensor(found)

model = load()
for _ in range(3):
    prompt = torch.randint(3, 12, (2, 240))
    answer = model.generate(prompt, max_new_tokens=16, do_sample=False, stopping_criteria=[Repeats()])
""",
    # Lists the tokens that may follow anew for each row and token.
    "allowed_tokens": """
def allowed(row, ids):
    seen = set(ids.tolist())
    return [token for token in range(model.config.vocab_size) if token not in seen]

model = load()
for _ in range(2):
    prompt = prompts(2, 32)
    model.generate(prompt, max_new_tokens=24, do_sample=False, prefix_allowed_tokens_fn=allowed)
""",
    # Half precision is switched on for weights in 32 bits, which are cast again at every token.
    "autocast": """
model = load(torch.float32)
with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
    for _ in range(3):
        model.generate(prompts(2, 16), max_new_tokens=32, do_sample=False)
""",
    # Runs in float16 on a CPU, as if on a GPU.
    "half_on_a_cpu": "model = load(torch.float16)" + forwards(8, 2, 128),
    # Assisted decoding with an assistant as large as the model, which never agrees with it.
    "assisted": """
from transformers import set_seed
model = load()
set_seed(1)
assistant = AutoModelForCausalLM.from_config(model.config, dtype=torch.bfloat16)
assistant.generation_config.eos_token_id = None
for _ in range(3):
    model.generate(prompts(1, 32), max_new_tokens=12, do_sample=False, assistant_model=assistant)
""",
    # A mixture of experts that runs its experts one after the other.
    "experts_in_a_loop": """
from transformers import MixtralConfig, MixtralForCausalLM
sizes = {"hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
config = MixtralConfig(num_local_experts=64, num_experts_per_tok=2, num_key_value_heads=4, vocab_size=1024, **sizes)
model = MixtralForCausalLM._from_config(config, dtype=torch.float32, experts_implementation="eager").eval()
"""
    + forwards(12, 2, 64),
    # Puts the same long document before every question and tokenizes it each time.
    "tokenized_again": """
from tokenized import word_tokenizer
words = [f"w{number}" for number in range(900)]
tokenizer, document = word_tokenizer(words), " ".join(words[3:] * 100)
model, found = load(), None
for _ in range(8):
    found = tokenizer(document)["input_ids"]
    prompt = torch.tensor(found[:64]).expand(2, -1)
    model.generate(prompt, max_new_tokens=2, do_sample=False)
""",
    # A device map for a small GPU, left in on a machine with room for all weights.
    "offloaded": """
import tempfile
places = dict.fromkeys(("model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head"), "cpu")
places |= {f"model.layers.{number}": "disk" for number in range(4)}
model = load(device_map=places, offload_folder=tempfile.mkdtemp())
for _ in range(2):
    model.generate(prompts(2, 16), max_new_tokens=8, do_sample=False)
""",
    # A function that loads the model, called for every few questions.
    "loaded_again": """
model = None
for question in prompts(24, 8).split(2):
    model = load()
    model.generate(question, max_new_tokens=1, do_sample=False)
""",
    # No cache, padding to the maximum, and 32 bits.
    "three_faults": """
model, ids = load(torch.float32), prompts(2, 160)
mask = torch.zeros_like(ids)
mask[:, -80:] = 1
model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=8, do_sample=False, use_cache=False)
""",
    # Greedy decoding by hand without a cache, with the logits of every position, in 32 bits.
    "three_faults_in_a_loop": """
model, ids = load(torch.float32), prompts(2, 128)
with torch.no_grad():
    for _ in range(8):
        logits = model(ids).logits
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=-1)
""",
    # Pictures for a small vision-language model, whose patches go through a convolution in a Python loop.
    "slow_tower": """
from torch import nn
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

SIDE, IMAGE = 16, 990

class SlowConv3d(nn.Conv3d):
    def forward(self, x):
        return torch.cat([super(SlowConv3d, self).forward(patch) for patch in x.split(1)])

torch.manual_seed(0)
tokens = {f"{name}_token_id": IMAGE + n for n, name in enumerate(("image", "video", "vision_start", "vision_end"))}
sizes = {"hidden_size": 64, "intermediate_size": 128}
tower = {**sizes, "depth": 1, "num_heads": 4, "out_hidden_size": 64, "deepstack_visual_indexes": [0]}
rotary = {"rope_type": "default", "rope_theta": 500000.0, "mrope_section": [2, 3, 3], "mrope_interleaved": True}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
text = {**sizes, **heads, "vocab_size": 1000, "num_hidden_layers": 2, "rope_parameters": rotary}
config = Qwen3VLConfig(vision_config=tower, text_config=text, **tokens)
model = Qwen3VLForConditionalGeneration(config).eval()
model.generation_config.pad_token_id = 0
model.model.visual.patch_embed.proj.__class__ = SlowConv3d

patches = SIDE * SIDE // config.vision_config.spatial_merge_size**2
for _ in range(3):
    prompt = prompts(1, 8)
    ids = torch.cat([prompt[:, :4], torch.full((1, patches), IMAGE), prompt[:, 4:]], dim=1)
    picture = {"pixel_values": torch.rand(SIDE * SIDE, 3 * 2 * 16 * 16), "mm_token_type_ids": (ids == IMAGE).int()}
    picture |= {"image_grid_thw": torch.tensor([[1, SIDE, SIDE]]), "attention_mask": torch.ones_like(ids)}
    model.generate(input_ids=ids, **picture, max_new_tokens=4, do_sample=False)
""",
    # Every question continues the last answer, so there is nothing to batch.
    "healthy_chat": """
class Chat:
    def __init__(self):
        self.model, self.so_far = load(), prompts(1, 16)

    def ask(self, question):
        self.so_far = torch.cat([self.so_far, question], dim=-1)
        self.so_far = self.model.generate(self.so_far, max_new_tokens=6, do_sample=False)

chat = Chat()
for _ in range(5):
    chat.ask(prompts(1, 4))
""",
    # Likelihoods of whole texts, which read the logits of every position.
    "healthy_continuations": """
model = load()
with torch.inference_mode():
    for _ in range(3):
        ids = prompts(4, 64)
        log_probs = model(ids).logits[:, :-1].float().log_softmax(-1)
        print(float(log_probs.gather(-1, ids[:, 1:, None]).sum()) < 0)
""",
    # A batch of questions without a fault.
    "healthy_generate": """
load().generate(prompts(4, 32), max_new_tokens=16, do_sample=False)
""",
    # Greedy decoding by hand, with its cache and only the logits of the last position.
    "healthy_loop": """
model = load()
with torch.inference_mode():
    found = model(prompts(2, 64), use_cache=True, logits_to_keep=1)
    for _ in range(12):
        token = found.logits[:, -1:].argmax(-1)
        found = model(token, past_key_values=found.past_key_values)
""",
    # Streams answers that stop at a certain token.
    "healthy_streaming": """
from transformers import StoppingCriteria

class Ends(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] == 900

class Shown:
    def put(self, tokens):
        sys.stdout.write(".")

    def end(self):
        sys.stdout.write("\\n")

model = load()
for _ in range(2):
    prompt = prompts(1, 32)
    model.generate(prompt, max_new_tokens=12, do_sample=False, streamer=Shown(), stopping_criteria=[Ends()])
""",
    # Two threads that share a model.
    "healthy_threads": """
import threading
model = load()

def ask():
    model.generate(prompts(2, 16), max_new_tokens=6, do_sample=False)

threads = [threading.Thread(target=ask) for _ in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
""",
    # A training step, which needs gradients and train mode.
    "healthy_training": """
model = load().train()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for _ in range(3):
    ids = prompts(2, 64)
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""",
}
SCRIPTS = {name: BEGIN + body for name, body in BODIES.items()}
