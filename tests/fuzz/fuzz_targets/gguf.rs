//! Any bytes as a model: what it says is read, or it is told why not; never more than the file can hold.
#![no_main]

use std::path::PathBuf;
use std::sync::LazyLock;

/// In memory where there is such a place.
static FILE: LazyLock<PathBuf> = LazyLock::new(|| {
    let memory = PathBuf::from("/dev/shm");
    let folder = if memory.is_dir() { memory } else { std::env::temp_dir() };
    folder.join(format!("warden-fuzz-{}.gguf", std::process::id()))
});

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    std::fs::write(&*FILE, bytes).expect("a file in memory");
    match warden_builder::gguf::read(&FILE) {
        Ok(facts) => {
            // Each value took at least a byte of it.
            let numbers: usize = facts.numbers.values().map(Vec::len).sum();
            assert!(numbers + facts.texts.len() + facts.tensors.len() <= bytes.len());
        }
        Err(problem) => assert!(problem.to_string().contains("warden-fuzz-"), "{problem}"),
    }
});
