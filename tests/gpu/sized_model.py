#!/usr/bin/env python3
"""Writes models with random weights by architecture and size: they load a GPU, or exercise parts of llama-server that the presets of
`llama-warden sample-model` do not reach (sliding windows, two head sizes, a vision encoder).

    sized_model.py PRESET FILE [NAME=NUMBER ...]

Needs nothing beyond Python. NAME=NUMBER changes a number of the preset, for example layers=8. Weights are f16 noise, and the same options give
the same bytes. Answers are invented words without an end token: channel 0 of the embedding is a constant that no layer writes to, so column 0
of the output matrix is a bias per token, and it excludes every token but words.
"""
import array
import math
import random
import struct
import sys
import zlib

# Heads of layers without a window are `kv_heads` of `head_size`; with a window, in gemma4, `window_kv_heads` of `window_head_size`.
PRESETS = {
    "llama": dict(layers=2, width=64, feed=128, heads=4, kv_heads=2, head_size=16, vocab=1024, context=8192),
    "llama-gpu": dict(layers=16, width=2048, feed=5632, heads=16, kv_heads=4, head_size=128, vocab=8192, context=131072),
    # Flash attention on CUDA copies a quantised cache layer by layer: 1 GiB for the whole context.
    "llama-wide": dict(layers=2, width=2048, feed=2048, heads=16, kv_heads=16, head_size=128, vocab=1024, context=131072),
    "gemma4": dict(layers=6, width=64, feed=128, heads=2, kv_heads=1, head_size=64, window_kv_heads=1, window_head_size=32, window=512,
                   vocab=1024, context=8192),
    "gemma4-gpu": dict(layers=18, width=2048, feed=6144, heads=8, kv_heads=2, head_size=512, window_kv_heads=4, window_head_size=256,
                       window=1024, vocab=8192, context=32768),
    # Encoders and projectors for --mmproj, for language models of the width `projection`; an image takes 70 or more tokens.
    "gemma4-vision": dict(layers=2, width=48, feed=96, heads=4, projection=64),
    "gemma4-vision-gpu": dict(layers=12, width=768, feed=3072, heads=12, projection=2048),
}
ALIGNMENT = 32
F32, F16 = 0, 1
FIRST_WORD = 256
CONTROL_TOKENS = ["<|bos|>", "<|im_start|>", "<|im_end|>", "<|pad|>", "<|image>", "<image|>"]
SYLLABLES = "ba do ki lu me no pi ra su te vo wa ze fi gu ja".split()
CHAT_TEMPLATE = (
    "{%- for message in messages -%}{{- '<|im_start|>' ~ message.role ~ '\\n' -}}"
    "{%- if message.content is string -%}{{- message.content -}}"
    "{%- else -%}{%- for part in message.content or [] -%}{%- if part.type == 'text' -%}{{- part.text -}}{%- endif -%}{%- endfor -%}"
    "{%- endif -%}{{- '<|im_end|>\\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}")
# Standard deviation of attention logits, so that attention is neither uniform nor restricted to one token.
ATTENTION = 1.5
EXCLUDING_BIAS = -1000.0


def text(value):
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def value(kind, content):
    """A metadata value with its type: u32, i32, f32, bool, str, or a list of one of these."""
    code, form = {"u32": (4, "I"), "i32": (5, "i"), "f32": (6, "f"), "bool": (7, "?"), "str": (8, None)}[kind]
    items = content if isinstance(content, list) else [content]
    data = b"".join(map(text, items)) if form is None else struct.pack(f"<{len(items)}{form}", *items)
    if isinstance(content, list):
        return struct.pack("<IIQ", 9, code, len(items)) + data
    return struct.pack("<I", code) + data


class Model:
    """A GGUF file under construction. Matrices repeat one block of noise whose length is prime, so rows differ."""

    def __init__(self, arch, name, wide):
        self.entries, self.tensors, self.blocks = [], [], {}
        source = array.array("H", random.Random(1).randbytes(8 * (1048573 if wide else 65521)))
        self.noise = [(sum(four) - 131070) / 37837.2 for four in zip(*[iter(source)] * 4)]
        self.set("general.architecture", "str", arch)
        self.set("general.name", "str", f"llama-warden sample ({name})")
        self.set("general.file_type", "u32", 1)

    def set(self, key, kind, content):
        self.entries.append(text(key) + value(kind, content))

    def numbers(self, prefix, **entries):
        for key, number in entries.items():
            self.set(f"{prefix}.{key.replace('__', '.')}", "u32", number)

    def vector(self, name, length, number, first=None):
        numbers = [number if first is None else first] + [number] * (length - 1)
        self.tensors.append((f"{name}.weight", [length], F32, 4 * length, lambda: [struct.pack(f"<{length}f", *numbers)]))

    def matrix(self, name, rows, columns, gain, clear_first=False, first=None, lengths=None, kind=F16):
        """A matrix whose product with a vector of variance 1 has the deviation `gain`; `first` yields column 0 of a row."""
        deviation = gain / math.sqrt(columns)
        size = 2 if kind == F16 else 4
        row_bytes = size * columns

        def data():
            form = "e" if kind == F16 else "f"
            if (deviation, kind) not in self.blocks:
                self.blocks[deviation, kind] = struct.pack(f"<{len(self.noise)}{form}", *(deviation * one for one in self.noise))
            block = self.blocks[deviation, kind]
            start = size * (zlib.crc32(name.encode()) % len(self.noise))
            endless = memoryview(block * (2 + row_bytes // len(block)))
            for row in range(rows):
                at = (start + row * row_bytes) % len(block)
                numbers = endless[at : at + row_bytes]
                if first:
                    yield struct.pack("<e", first(row)) + numbers[2:]
                else:
                    yield bytes(row_bytes) if clear_first and row == 0 else numbers

        self.tensors.append((f"{name}.weight", lengths or [columns, rows], kind, rows * row_bytes, data))

    def vocabulary(self, size):
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = [byte for byte in range(256) if byte not in printable]
        symbols = [chr(byte) if byte in printable else chr(0x100 + others.index(byte)) for byte in range(256)]
        words = size - FIRST_WORD - len(CONTROL_TOKENS)
        # Two syllables as far as they suffice, then three, and so on.
        syllables = [max((max(word, 1).bit_length() - 1) // 4 + 1, 2) for word in range(words)]
        tokens = symbols + [symbols[32] + "".join(SYLLABLES[word >> 4 * place & 15] for place in range(syllables[word])) for word in range(words)]
        self.set("tokenizer.ggml.model", "str", "gpt2")
        self.set("tokenizer.ggml.pre", "str", "llama-bpe")
        self.set("tokenizer.ggml.tokens", "str", tokens + CONTROL_TOKENS)
        self.set("tokenizer.ggml.token_type", "i32", [1] * len(tokens) + [3] * len(CONTROL_TOKENS))
        # llama.cpp demands a list of merges; this one yields no token of the vocabulary.
        self.set("tokenizer.ggml.merges", "str", [f"{symbols[32]} b"])
        self.numbers("tokenizer.ggml", bos_token_id=len(tokens), eos_token_id=len(tokens) + 2, padding_token_id=len(tokens) + 3)
        self.set("tokenizer.ggml.add_bos_token", "bool", True)
        self.set("tokenizer.ggml.add_eos_token", "bool", False)
        self.set("tokenizer.chat_template", "str", CHAT_TEMPLATE)
        return words

    def words(self, s, deviation):
        """Embedding and output: only words can be chosen."""
        words = self.vocabulary(s["vocab"])
        self.matrix("token_embd", s["vocab"], s["width"], deviation * math.sqrt(s["width"]), first=lambda row: 8.0 * deviation)
        self.vector("output_norm", s["width"], 1.0)
        self.matrix("output", s["vocab"], s["width"], 4.0, first=lambda row: 0.0 if 0 <= row - FIRST_WORD < words else EXCLUDING_BIAS)

    def write(self, path):
        with open(path, "wb") as file:
            file.write(b"GGUF" + struct.pack("<IQQ", 3, len(self.tensors), len(self.entries)) + b"".join(self.entries))
            offset = 0
            for name, lengths, kind, size, _ in self.tensors:
                file.write(text(name) + struct.pack(f"<I{len(lengths)}QIQ", len(lengths), *lengths, kind, offset))
                offset += -(-size // ALIGNMENT) * ALIGNMENT
            for *_, data in [((), lambda: []), *self.tensors]:
                file.writelines(data())
                file.write(bytes(-file.tell() % ALIGNMENT))


def llama(s):
    model = Model("llama", "llama", s["width"] > 512)
    model.numbers("llama", context_length=s["context"], embedding_length=s["width"], block_count=s["layers"], feed_forward_length=s["feed"],
                  attention__head_count=s["heads"], attention__head_count_kv=s["kv_heads"], attention__key_length=s["head_size"],
                  attention__value_length=s["head_size"], rope__dimension_count=s["head_size"], vocab_size=s["vocab"])
    model.set("llama.rope.freq_base", "f32", 500000.0)
    model.set("llama.attention.layer_norm_rms_epsilon", "f32", 1e-5)
    model.words(s, 1.0)
    width, queries, keys = s["width"], s["heads"] * s["head_size"], s["kv_heads"] * s["head_size"]
    # All layers together add the same amount to the residual stream.
    share = math.sqrt(3.0 / (2 * s["layers"]))
    for layer in range(s["layers"]):
        p = f"blk.{layer}."
        model.vector(p + "attn_norm", width, 1.0)
        model.vector(p + "ffn_norm", width, 1.0)
        model.matrix(p + "attn_q", queries, width, ATTENTION)
        model.matrix(p + "attn_k", keys, width, 1.0)
        model.matrix(p + "attn_v", keys, width, 1.0)
        model.matrix(p + "attn_output", width, queries, 1.5 * share, clear_first=True)
        model.matrix(p + "ffn_gate", s["feed"], width, 1.5)
        model.matrix(p + "ffn_up", s["feed"], width, 1.5)
        model.matrix(p + "ffn_down", width, s["feed"], share, clear_first=True)
    return model


def gemma4(s):
    """Keys and tensors are those of llama.cpp's src/models/gemma4.cpp; it has an output matrix, unlike real models of the family."""
    model = Model("gemma4", "gemma4", s["width"] > 512)
    width, layers = s["width"], s["layers"]
    windowed = [layer % 6 != 5 and layer + 1 != layers for layer in range(layers)]
    model.set("gemma4.attention.head_count_kv", "u32", [s["window_kv_heads"] if one else s["kv_heads"] for one in windowed])
    model.set("gemma4.attention.sliding_window_pattern", "bool", windowed)
    for key, number in [("attention.layer_norm_rms_epsilon", 1e-6), ("rope.freq_base", 1e6), ("rope.freq_base_swa", 1e4),
                        ("final_logit_softcapping", 30.0)]:
        model.set(f"gemma4.{key}", "f32", number)
    model.numbers("gemma4", context_length=s["context"], embedding_length=width, block_count=layers, feed_forward_length=s["feed"],
                  attention__head_count=s["heads"], attention__key_length=s["head_size"], attention__value_length=s["head_size"],
                  attention__key_length_swa=s["window_head_size"], attention__value_length_swa=s["window_head_size"],
                  attention__sliding_window=s["window"], attention__shared_kv_layers=0, rope__dimension_count=s["head_size"],
                  rope__dimension_count_swa=s["window_head_size"], embedding_length_per_layer_input=0, vocab_size=s["vocab"])
    # llama.cpp multiplies embeddings by the square root of the width.
    model.words(s, 1.0 / math.sqrt(width))
    model.vector("rope_freqs", s["head_size"] // 2, 1.0)
    share = math.sqrt(3.0 / (2 * layers))
    for layer in range(layers):
        head = s["window_head_size"] if windowed[layer] else s["head_size"]
        queries, keys = s["heads"] * head, (s["window_kv_heads"] if windowed[layer] else s["kv_heads"]) * head
        p = f"blk.{layer}."
        model.vector(p + "attn_norm", width, 1.0)
        model.vector(p + "ffn_norm", width, 1.0)
        # The norm after each part scales its output, and excludes the constant channel.
        model.vector(p + "post_attention_norm", width, share, first=0.0)
        model.vector(p + "post_ffw_norm", width, share, first=0.0)
        # Queries and keys are normalised, and their product is not divided by the square root of the head size.
        model.vector(p + "attn_q_norm", head, ATTENTION / math.sqrt(head))
        model.vector(p + "attn_k_norm", head, 1.0)
        for name, rows, columns, gain in [("attn_q", queries, width, 1.0), ("attn_k", keys, width, 1.0), ("attn_v", keys, width, 1.0),
                                          ("attn_output", width, queries, 1.0), ("ffn_gate", s["feed"], width, 1.5),
                                          ("ffn_up", s["feed"], width, 1.5), ("ffn_down", width, s["feed"], 1.0)]:
            model.matrix(p + name, rows, columns, gain)
    return model


def vision(s):
    """Keys and tensors are those of llama.cpp's tools/mtmd/models/gemma4v.cpp."""
    model = Model("clip", "gemma4v", s["width"] > 512)
    width, head = s["width"], s["width"] // s["heads"]
    for key, kind, content in [("general.type", "str", "mmproj"), ("clip.has_vision_encoder", "bool", True),
                               ("clip.projector_type", "str", "gemma4v"), ("clip.use_gelu", "bool", True),
                               ("clip.vision.attention.layer_norm_epsilon", "f32", 1e-6), ("clip.vision.image_mean", "f32", [0.0] * 3),
                               ("clip.vision.image_std", "f32", [1.0] * 3)]:
        model.set(key, kind, content)
    model.numbers("clip.vision", embedding_length=width, feed_forward_length=s["feed"], block_count=s["layers"],
                  projection_dim=s["projection"], attention__head_count=s["heads"], image_size=768, patch_size=16, projector__scale_factor=3)
    model.matrix("v.patch_embd", width, 768, 2.0, lengths=[16, 16, 3, width])
    model.matrix("v.position_embd", 2048, width, 0.3 * math.sqrt(width), lengths=[width, 1024, 2], kind=F32)
    # Images do not write to the constant channel of the language model.
    model.matrix("mm.input_projection", s["projection"], width, 1.5, clear_first=True)
    for layer in range(s["layers"]):
        p = f"v.blk.{layer}."
        for norm in ["ln1", "ln2", "attn_post_norm", "ffn_post_norm"]:
            model.vector(p + norm, width, 1.0)
        model.vector(p + "attn_q_norm", head, ATTENTION / math.sqrt(head))
        model.vector(p + "attn_k_norm", head, 1.0)
        for part in ["attn_q", "attn_k", "attn_v", "attn_out"]:
            model.matrix(p + part, width, width, 1.0)
        model.matrix(p + "ffn_gate", s["feed"], width, 1.5)
        model.matrix(p + "ffn_up", s["feed"], width, 1.5)
        model.matrix(p + "ffn_down", width, s["feed"], 1.0)
    return model


def main():
    if len(sys.argv) < 3 or sys.argv[1] not in PRESETS:
        sys.exit(f"sized_model.py PRESET FILE [NAME=NUMBER ...], with one of these presets: {', '.join(PRESETS)}")
    preset, path = sys.argv[1:3]
    changed = {name: int(number) for name, number in (word.split("=", 1) for word in sys.argv[3:])}
    write = vision if "vision" in preset else gemma4 if preset.startswith("gemma4") else llama
    write({**PRESETS[preset], **changed}).write(path)


main()
