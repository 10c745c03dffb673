//! Properties of sized models: header facts, announced sizes, reproducible bytes.

use std::collections::BTreeMap;

use sha2::{Digest, Sha256};

use super::*;

const LLAMA: SizedModel = SizedModel { arch: ModelArch::Llama, sizes: ModelSizes::LLAMA, seed: 1 };
const GEMMA4: SizedModel = SizedModel { arch: ModelArch::Gemma4, sizes: ModelSizes::GEMMA4, seed: 1 };
const VISION: VisionModel = VisionModel { sizes: VisionSizes::SMALL, width: 64, seed: 1 };

fn bytes(file: &GgufWriter) -> Vec<u8> {
    let mut out = Vec::new();
    file.write(&mut out).unwrap();
    out
}

/// Reads the written tensors by name, with dimensions, type and offset.
fn tensors(all: &[u8]) -> BTreeMap<String, (Vec<u64>, u32, u64)> {
    struct Reader<'a>(&'a [u8]);
    impl Reader<'_> {
        fn take(&mut self, count: usize) -> Vec<u8> {
            let (taken, rest) = self.0.split_at(count);
            self.0 = rest;
            taken.to_vec()
        }
        fn number(&mut self, bytes: usize) -> u64 {
            self.take(bytes).iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
        }
        fn text(&mut self) -> String {
            let length = self.number(8);
            String::from_utf8(self.take(usize::try_from(length).unwrap())).unwrap()
        }
        fn value(&mut self, kind: u64) {
            match kind {
                7 => drop(self.take(1)),
                4..=6 => drop(self.take(4)),
                8 => drop(self.text()),
                9 => {
                    let (kind, count) = (self.number(4), self.number(8));
                    (0..count).for_each(|_| self.value(kind));
                }
                other => panic!("a value of type {other}"),
            }
        }
    }
    let mut reader = Reader(all);
    assert_eq!(reader.take(8), b"GGUF\x03\0\0\0");
    let (count, entries) = (reader.number(8), reader.number(8));
    for _ in 0..entries {
        reader.text();
        let kind = reader.number(4);
        reader.value(kind);
    }
    (0..count)
        .map(|_| {
            let name = reader.text();
            let dimensions = reader.number(4);
            let lengths = (0..dimensions).map(|_| reader.number(8)).collect();
            (name, (lengths, u32::try_from(reader.number(4)).unwrap(), reader.number(8)))
        })
        .collect()
}

#[test]
fn the_same_numbers_give_these_bytes_on_every_platform() {
    let hash = |file: &GgufWriter| hex::encode(Sha256::digest(bytes(file)))[..16].to_owned();
    let hashes = [hash(&LLAMA.file()), hash(&GEMMA4.file()), hash(&VISION.file())];
    assert_eq!(hashes, ["dc8323ee4dec5bd7", "1be18a0cef534c89", "b2cbb349831e09d9"]);
}

#[test]
fn another_seed_gives_another_model_of_the_same_size() {
    let (one, two) = (GEMMA4, SizedModel { seed: 2, ..GEMMA4 });
    let (one, two) = (bytes(&one.file()), bytes(&two.file()));
    assert!(one != two && one.len() == two.len());
}

#[test]
fn a_tiny_model_of_each_kind_is_under_a_megabyte_and_a_gpu_has_gigabytes_to_load() {
    for model in [LLAMA, GEMMA4] {
        assert!(bytes(&model.file()).len() < 1_500_000);
    }
    for (arch, sizes) in
        [(ModelArch::Llama, ModelSizes::LLAMA_GPU), (ModelArch::Gemma4, ModelSizes::GEMMA4_GPU)]
    {
        let tensors = SizedModel { arch, sizes, seed: 1 }.file().tensor_bytes();
        assert!((1_500_000_000..4_000_000_000).contains(&tensors), "{arch:?}: {tensors} bytes");
    }
}

#[test]
fn gemma4_has_two_kinds_of_layers_and_what_llama_cpp_asks_of_each() {
    let model = GEMMA4;
    let found = tensors(&bytes(&model.file()));
    // Four tensors of the model, and thirteen for each of six layers.
    assert_eq!(found.len(), 4 + 13 * 6);
    let lengths = |name: &str| found.get(name).map(|(lengths, ..)| lengths.clone()).unwrap_or_default();
    assert_eq!(lengths("blk.0.attn_q.weight"), [64, 2 * 32]);
    assert_eq!(lengths("blk.5.attn_q.weight"), [64, 2 * 64]);
    assert_eq!(lengths("blk.5.attn_output.weight"), [2 * 64, 64]);
    assert_eq!(lengths("blk.0.attn_k_norm.weight"), [32]);
    assert_eq!(lengths("rope_freqs.weight"), [32]);
    assert_eq!(lengths("output.weight"), [64, 1024]);
    let kinds: Vec<u32> =
        ["blk.0.attn_q.weight", "blk.0.attn_norm.weight"].map(|name| found[name].1).to_vec();
    assert_eq!(kinds, [1, 0], "matrices are f16, vectors f32");
}

#[test]
fn what_is_announced_is_what_is_written() {
    for all in [bytes(&LLAMA.file()), bytes(&GEMMA4.file()), bytes(&VISION.file())] {
        let found = tensors(&all);
        let size =
            |lengths: &[u64], kind: u32| lengths.iter().product::<u64>() * if kind == 0 { 4 } else { 2 };
        let mut places: Vec<(u64, u64)> =
            found.values().map(|(lengths, kind, offset)| (*offset, size(lengths, *kind))).collect();
        places.sort_unstable();
        let end = places.iter().fold(0, |end, (offset, bytes)| {
            assert_eq!(*offset, end, "tensors lie one after the other");
            (offset + bytes).next_multiple_of(32)
        });
        let header = all.len() as u64 - end;
        assert!(header < 100_000 && header.is_multiple_of(32), "{header} bytes before the data");
    }
}

#[test]
fn only_words_can_be_chosen_and_no_layer_touches_what_decides_it() {
    let model = LLAMA;
    let all = bytes(&model.file());
    let found = tensors(&all);
    let data = |name: &str| {
        let (lengths, kind, offset) = &found[name];
        let bytes = lengths.iter().product::<u64>() * if *kind == 0 { 4 } else { 2 };
        let last = found
            .values()
            .map(|(lengths, kind, offset)| {
                offset + lengths.iter().product::<u64>() * if *kind == 0 { 4 } else { 2 }
            })
            .max()
            .unwrap();
        let start = all.len() - usize::try_from(last.next_multiple_of(32)).unwrap()
            + usize::try_from(*offset).unwrap();
        &all[start..start + usize::try_from(bytes).unwrap()]
    };
    let row = 64 * 2;
    for (token, numbers) in data("output.weight").chunks(row).enumerate() {
        let bias = u16::from_le_bytes([numbers[0], numbers[1]]);
        let word = (256..256 + 1024 - 262).contains(&token);
        assert_eq!(bias, if word { 0 } else { super::super::half::to_bits(EXCLUDING_BIAS) }, "token {token}");
    }
    for layer in 0..2 {
        assert!(data(&format!("blk.{layer}.attn_output.weight"))[..row].iter().all(|byte| *byte == 0));
        assert!(data(&format!("blk.{layer}.ffn_down.weight"))[..128 * 2].iter().all(|byte| *byte == 0));
    }
}
