"""A decoder in plain PyTorch with a cache of fixed size."""

import torch
import torch.nn as nn
from torch.nn import functional as F

VOCAB, BLOCK, LAYERS, HEADS, WIDTH = 8192, 256, 8, 8, 512


class KVCache(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("k", torch.zeros(1, HEADS, BLOCK, WIDTH // HEADS))
        self.register_buffer("v", torch.zeros(1, HEADS, BLOCK, WIDTH // HEADS))

    def update(self, start, k, v):
        end = start + k.shape[2]
        self.k[:, :, start:end], self.v[:, :, start:end] = k, v
        return self.k[:, :, :end], self.v[:, :, :end]


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.wqkv, self.wo = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.w1, self.w2 = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.cache = KVCache()

    def forward(self, x, start):
        b, t, c = x.shape
        q, k, v = (y.view(b, t, HEADS, -1).transpose(1, 2) for y in self.wqkv(self.norm_1(x)).chunk(3, dim=-1))
        k, v = self.cache.update(start, k, v)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=t > 1)
        x = x + self.wo(y.transpose(1, 2).reshape(b, t, c))
        return x + self.w2(F.silu(self.w1(self.norm_2(x))))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.output = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids, start):
        x = self.tokens(ids) + self.positions(torch.arange(start, start + ids.shape[1]))
        for layer in self.layers:
            x = layer(x, start)
        return self.output(self.norm(x[:, -1]))


@torch.inference_mode()
def decode(model, ids, count):
    start, step = 0, ids
    for _ in range(count):
        probs = F.softmax(model(step, start) / 0.8, dim=-1)
        start += step.shape[1]
        step = torch.multinomial(probs, 1)
        ids = torch.cat([ids, step], dim=1)
    return ids


torch.manual_seed(3)
model = Decoder().to(torch.bfloat16).eval()
for sample in range(3):
    print(sample, decode(model, torch.randint(VOCAB, (1, 64)), 180)[0, -5:].tolist())
