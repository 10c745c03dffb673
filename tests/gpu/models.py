"""Models with random weights that are large enough to exercise a GPU, the same for the same arguments.

    models.py OUT [--scale gpu|tiny]

writes OUT/llama.gguf (a plain transformer), OUT/gemma4.gguf (sliding-window and full attention with different head
sizes) and OUT/mmproj.gguf (a vision projector for it). Needs numpy and the package gguf. What they say is noise; what
matters is that a server computes on them as it does on real ones.
"""
import argparse
import itertools
import pathlib

import gguf
import numpy as np

RNG = np.random.default_rng(0)


def noise(*shape, scale=None, dtype=np.float16):
    count = int(np.prod(shape))
    scale = scale or 1 / np.sqrt(shape[-1])
    base = RNG.standard_normal(min(count, 1 << 20), dtype=np.float32) * scale
    return np.resize(base, count).reshape(shape).astype(dtype)


def ones(count):
    return np.ones(count, np.float32)


class Writer:
    """A GGUF file in the making; `tensor` gives every tensor the suffix that loaders expect."""

    def __init__(self, path, arch):
        self.file = gguf.GGUFWriter(str(path), arch)
        self.file.add_file_type(1)

    def tensor(self, name, data):
        self.file.add_tensor(f"{name}.weight", data)

    def norms(self, prefix, names, size):
        for name in names:
            self.tensor(prefix + name, ones(size))

    def matrices(self, prefix, shapes):
        for name, shape in shapes.items():
            self.tensor(prefix + name, noise(*shape))

    def vocabulary(self, size):
        letters = "etaoinshrdlucmfwypvbgkjqxz"
        tokens = [b"<unk>", b"<s>", b"</s>"] + [b"<0x%02X>" % byte for byte in range(256)]
        words = ["\u2581" + letter for letter in letters] + list(letters) + ["\u2581"]
        triples = ("\u2581" + "".join(triple) for triple in itertools.product(letters, repeat=3))
        words += itertools.islice(triples, max(0, size - len(tokens) - len(words)))
        words = words[: size - len(tokens)]
        kinds = [2, 3, 3] + [6] * 256 + [1] * len(words)
        scores = [0.0] * len(tokens) + [-float(rank + 1) for rank in range(len(words))]
        tokens += [word.encode() for word in words]
        while len(tokens) < size:
            tokens.append(f"\u2581zz{len(tokens)}".encode())
            kinds.append(1)
            scores.append(-1e4)
        file = self.file
        file.add_tokenizer_model("llama")
        file.add_tokenizer_pre("default")
        file.add_token_list(tokens)
        file.add_token_types(kinds)
        file.add_token_scores(scores)
        file.add_bos_token_id(1)
        file.add_eos_token_id(2)
        file.add_unk_token_id(0)
        file.add_add_bos_token(True)

    def close(self):
        self.file.write_header_to_file()
        self.file.write_kv_data_to_file()
        self.file.write_tensors_to_file()
        self.file.close()


def llama(path, width, layers, heads, kv_heads, feed, vocab, context):
    w, head = Writer(path, "llama"), width // heads
    f = w.file
    f.add_context_length(context)
    f.add_embedding_length(width)
    f.add_block_count(layers)
    f.add_feed_forward_length(feed)
    f.add_head_count(heads)
    f.add_head_count_kv(kv_heads)
    f.add_layer_norm_rms_eps(1e-5)
    f.add_rope_dimension_count(head)
    f.add_rope_freq_base(500000.0)
    f.add_vocab_size(vocab)
    w.vocabulary(vocab)
    w.tensor("token_embd", noise(vocab, width, scale=1.0))
    w.tensor("output", noise(vocab, width))
    w.norms("", ["output_norm"], width)
    for layer in range(layers):
        p = f"blk.{layer}."
        w.norms(p, ["attn_norm", "ffn_norm"], width)
        kv = (kv_heads * head, width)
        w.matrices(p, {"attn_q": (width, width), "attn_k": kv, "attn_v": kv, "attn_output": (width, width),
                       "ffn_gate": (feed, width), "ffn_up": (feed, width), "ffn_down": (width, feed)})
    w.close()


def gemma4(path, width, layers, heads, kv_window, kv_full, head_window, head_full, feed, vocab, context, window):
    w = Writer(path, "gemma4")
    f = w.file
    in_window = [layer % 6 != 5 for layer in range(layers)]
    f.add_context_length(context)
    f.add_embedding_length(width)
    f.add_block_count(layers)
    f.add_feed_forward_length(feed)
    f.add_head_count(heads)
    f.add_head_count_kv([kv_window if short else kv_full for short in in_window])
    f.add_layer_norm_rms_eps(1e-6)
    f.add_key_length(head_full)
    f.add_value_length(head_full)
    f.add_uint32("gemma4.attention.key_length_swa", head_window)
    f.add_uint32("gemma4.attention.value_length_swa", head_window)
    f.add_rope_dimension_count(head_full)
    f.add_uint32("gemma4.rope.dimension_count_swa", head_window)
    f.add_rope_freq_base(1e6)
    f.add_float32("gemma4.rope.freq_base_swa", 1e4)
    f.add_sliding_window(window)
    f.add_array("gemma4.attention.sliding_window_pattern", in_window)
    f.add_uint32("gemma4.attention.shared_kv_layers", 0)
    f.add_uint32("gemma4.embedding_length_per_layer_input", 0)
    f.add_float32("gemma4.final_logit_softcapping", 30.0)
    f.add_vocab_size(vocab)
    w.vocabulary(vocab)
    w.tensor("token_embd", noise(vocab, width, scale=1.0))
    w.norms("", ["output_norm"], width)
    w.tensor("rope_freqs", ones(head_full // 2))
    for layer in range(layers):
        p = f"blk.{layer}."
        head, kv_heads = (head_window, kv_window) if in_window[layer] else (head_full, kv_full)
        w.norms(p, ["attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"], width)
        w.norms(p, ["attn_q_norm", "attn_k_norm"], head)
        kv = (kv_heads * head, width)
        w.matrices(p, {"attn_q": (heads * head, width), "attn_k": kv, "attn_v": kv,
                       "attn_output": (width, heads * head), "ffn_gate": (feed, width), "ffn_up": (feed, width),
                       "ffn_down": (width, feed)})
    w.close()


def projector(path, width, layers, heads, feed, out, patch):
    w = Writer(path, "clip")
    f = w.file
    f.add_bool("clip.has_vision_encoder", True)
    f.add_string("clip.projector_type", "gemma4v")
    f.add_bool("clip.use_gelu", True)
    numbers = {"embedding_length": width, "feed_forward_length": feed, "block_count": layers, "projection_dim": out,
               "image_size": 768, "patch_size": patch, "attention.head_count": heads, "projector.scale_factor": 3}
    for key, number in numbers.items():
        f.add_uint32(f"clip.vision.{key}", number)
    f.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
    f.add_array("clip.vision.image_mean", [0.0, 0.0, 0.0])
    f.add_array("clip.vision.image_std", [1.0, 1.0, 1.0])
    w.tensor("v.patch_embd", noise(width, 3, patch, patch, scale=0.02))
    w.tensor("v.position_embd", noise(2, 1024, width, scale=0.02, dtype=np.float32))
    w.tensor("mm.input_projection", noise(out, width))
    for layer in range(layers):
        p = f"v.blk.{layer}."
        w.norms(p, ["ln1", "ln2", "attn_post_norm", "ffn_post_norm"], width)
        square = (width, width)
        w.matrices(p, {"attn_q": square, "attn_k": square, "attn_v": square, "attn_out": square})
        w.norms(p, ["attn_q_norm", "attn_k_norm"], width // heads)
        w.matrices(p, {"ffn_gate": (feed, width), "ffn_up": (feed, width), "ffn_down": (width, feed)})
    w.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--scale", choices=["gpu", "tiny"], default="gpu")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.scale == "gpu":
        llama(args.out / "llama.gguf", 2048, 16, 16, 4, 5632, 8192, 131072)
        gemma4(args.out / "gemma4.gguf", 2048, 18, 8, 4, 2, 256, 512, 6144, 8192, 32768, 1024)
        projector(args.out / "mmproj.gguf", 768, 12, 12, 3072, 2048, 16)
    else:
        llama(args.out / "llama.gguf", 64, 2, 4, 2, 128, 512, 8192)
        gemma4(args.out / "gemma4.gguf", 64, 6, 2, 1, 1, 32, 64, 128, 512, 8192, 512)
        projector(args.out / "mmproj.gguf", 48, 2, 4, 96, 64, 16)


if __name__ == "__main__":
    main()
