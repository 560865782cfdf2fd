"""Transcribe a folder of recordings with Whisper on whatever device there is."""

import sys

import numpy as np
import torch
from transformers import AutoFeatureExtractor, AutoModelForSpeechSeq2Seq

device = "cuda:0" if torch.cuda.is_available() else "cpu"
torch_dtype = torch.float16 if torch.cuda.is_available() else torch.float32

extractor = AutoFeatureExtractor.from_pretrained(sys.argv[1])
model = AutoModelForSpeechSeq2Seq.from_pretrained(sys.argv[1], dtype=torch_dtype, low_cpu_mem_usage=True)
model.to(device)

rng = np.random.default_rng(3)
for name in ("interview.wav", "meeting.wav", "voicemail.wav"):
    sound = rng.normal(0, 0.1, 16_000 * 12).astype(np.float32)
    features = extractor(sound, sampling_rate=16_000, return_tensors="pt").input_features
    ids = model.generate(features.to(device, torch_dtype), max_new_tokens=64)
    print(name, ids.shape[1], "tokens")
