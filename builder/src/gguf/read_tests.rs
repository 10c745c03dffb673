//! Reads complete files; damaged and foreign files give an error that names the problem.

use proptest::prelude::*;

use super::*;
use crate::gguf::{GgufWriter, MetadataValue};

fn model() -> Vec<u8> {
    let mut file = GgufWriter::new("llama");
    file.set("llama.block_count", MetadataValue::U32(2));
    file.set("llama.rope.freq_base", MetadataValue::F32(0.5));
    file.set("llama.attention.head_count_kv", MetadataValue::I32s(vec![4, 8]));
    file.set("tokenizer.ggml.tokens", MetadataValue::Strings(vec!["a".to_owned(), "bc".to_owned()]));
    file.set("general.name", MetadataValue::String("x".repeat(100)));
    file.matrix("token_embd.weight", 4, vec![1.0; 8]);
    file.vector("output_norm.weight", vec![1.0; 3]);
    let mut bytes = Vec::new();
    file.write(&mut bytes).unwrap();
    bytes
}

fn read_bytes(bytes: &[u8]) -> Result<GgufFacts, GgufError> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.gguf");
    std::fs::write(&path, bytes).unwrap();
    read(&path)
}

#[test]
fn a_file_says_what_its_model_is_made_of() {
    let facts = read_bytes(&model()).unwrap();
    assert_eq!(facts.architecture(), "llama");
    assert_eq!(facts.architecture_numbers("block_count"), Some(&[2.0][..]));
    assert_eq!(facts.architecture_numbers("rope.freq_base"), Some(&[0.5][..]));
    assert_eq!(facts.architecture_numbers("attention.head_count_kv"), Some(&[4.0, 8.0][..]));
    assert_eq!(facts.architecture_numbers("nothing"), None);
    assert_eq!(facts.lengths["tokenizer.ggml.tokens"], 2);
    let sizes: Vec<(&str, &[u64], u64)> =
        facts.tensors.iter().map(|tensor| (&*tensor.name, &*tensor.lengths, tensor.bytes)).collect();
    assert_eq!(sizes, [("token_embd.weight", &[4, 2][..], 32), ("output_norm.weight", &[3][..], 32)]);
    assert_eq!(facts.file_bytes, model().len() as u64);
}

#[test]
fn a_file_that_ends_anywhere_is_damaged_and_one_that_is_none_is_told_so() {
    let whole = model();
    let head = whole.len() - 64;
    for end in 8..head {
        let told = read_bytes(&whole[..end]).unwrap_err();
        assert!(matches!(told, GgufError::Damaged { .. }), "{end}: {told}");
    }
    for (bytes, words) in [
        (&b""[..], "empty"),
        (b"GG", "empty"),
        (b"PK\x03\x04 and so on", "does not begin like one"),
        (b"GGUF\x01\0\0\0\0\0\0\0", "version 1"),
        (b"GGUF\0\0\0\x03\0\0\0\0", "big-endian"),
    ] {
        let told = read_bytes(bytes).unwrap_err().to_string();
        assert!(told.contains(words), "{told}");
    }
    assert!(read(Path::new("/nowhere/m.gguf")).unwrap_err().to_string().contains("cannot read"));
    assert!(read(Path::new("/")).unwrap_err().to_string().contains("no file"));
}

#[test]
fn numbers_that_no_file_can_mean_are_not_believed() {
    let mut odd = model();
    odd[8..16].copy_from_slice(&u64::MAX.to_le_bytes());
    assert!(read_bytes(&odd).unwrap_err().to_string().contains("tensors"));
    let mut odd = model();
    odd[16..24].copy_from_slice(&(1_u64 << 40).to_le_bytes());
    assert!(read_bytes(&odd).unwrap_err().to_string().contains("entries"));
    // Change each byte in turn: no result may exceed the file.
    let whole = model();
    for at in 24..whole.len() - 64 {
        let mut odd = whole.clone();
        odd[at] ^= 0xff;
        if let Ok(facts) = read_bytes(&odd) {
            let bytes: u64 = facts.tensors.iter().map(|tensor| tensor.bytes).sum();
            assert!(bytes <= whole.len() as u64, "{at}: {facts:?}");
        }
    }
}

#[test]
fn a_model_that_is_split_is_read_as_one() {
    let folder = tempfile::tempdir().unwrap();
    let part = |number: usize| {
        let mut file = GgufWriter::new("llama");
        file.set("split.count", MetadataValue::U32(2));
        file.vector(&format!("blk.{number}.x"), vec![1.0; 16]);
        let mut bytes = Vec::new();
        file.write(&mut bytes).unwrap();
        let path = folder.path().join(format!("m-{number:05}-of-00002.gguf"));
        std::fs::write(&path, bytes).unwrap();
        path
    };
    let first = part(1);
    let missing = read(&first).unwrap_err().to_string();
    assert!(missing.contains("m-00002-of-00002.gguf"), "{missing}");
    let second = part(2);
    let facts = read(&first).unwrap();
    let names: Vec<&str> = facts.tensors.iter().map(|tensor| &*tensor.name).collect();
    assert_eq!((names, facts.tensors[1].bytes), (vec!["blk.1.x", "blk.2.x"], 64));
    let renamed = folder.path().join("other.gguf");
    std::fs::rename(first, &renamed).unwrap();
    for odd in [renamed, second] {
        assert!(read(&odd).unwrap_err().to_string().contains("one of 2 parts"));
    }
}

#[test]
fn a_pipe_waits_for_nobody_and_texts_without_end_are_not_kept() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.gguf");
    rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    let told = read(&path).unwrap_err();
    assert!(matches!(told, GgufError::NotGguf { .. }), "{told}");
    // 20 MiB of short texts.
    let mut bytes = b"GGUF\x03\0\0\0".to_vec();
    bytes.extend_from_slice(&0_u64.to_le_bytes());
    bytes.extend_from_slice(&400_u64.to_le_bytes());
    for n in 0..400_u64 {
        bytes.extend_from_slice(&8_u64.to_le_bytes());
        bytes.extend_from_slice(&n.to_le_bytes());
        bytes.extend_from_slice(&TEXT_TYPE.to_le_bytes());
        bytes.extend_from_slice(&(50_u64 << 10).to_le_bytes());
        bytes.resize(bytes.len() + (50 << 10), 0xff);
    }
    let told = read_bytes(&bytes).unwrap_err().to_string();
    assert!(told.contains("16 MiB"), "{told}");
}

proptest! {
    /// Checks that any bytes give an answer soon, and no size beyond the file's.
    #[test]
    fn any_bytes_are_read_or_refused(
        changes in proptest::collection::vec((any::<proptest::sample::Index>(), any::<u8>(), 0..4_u8), 0..12),
        words in proptest::collection::vec((any::<proptest::sample::Index>(), any::<u64>()), 0..3),
    ) {
        let mut bytes = model();
        for (at, word) in words {
            let at = at.index(bytes.len() - 8);
            bytes[at..at + 8].copy_from_slice(&word.to_le_bytes());
        }
        for (at, byte, how) in changes {
            let at = at.index(bytes.len());
            match how {
                0 => bytes[at] = byte,
                1 => bytes.insert(at, byte),
                2 => drop(bytes.remove(at)),
                _ => bytes.truncate(at.max(8)),
            }
            bytes.resize(bytes.len().max(9), 0);
        }
        match read_bytes(&bytes) {
            Ok(facts) => {
                let sum = facts.tensors.iter().try_fold(0_u64, |sum, tensor| sum.checked_add(tensor.bytes));
                prop_assert!(sum.is_some_and(|sum| sum <= bytes.len() as u64), "{:?}", facts);
            }
            Err(told) => prop_assert!(told.to_string().contains("m.gguf"), "{}", told),
        }
    }
}

impl GgufFacts {
    /// An architecture's number, such as `block_count`.
    pub(crate) fn architecture_numbers(&self, name: &str) -> Option<&[f64]> {
        self.numbers.get(&format!("{}.{name}", self.architecture())).map(Vec::as_slice)
    }
}
