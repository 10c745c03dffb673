//! The reader of models reads no more values than any bytes can hold, or says why it cannot read them.
#![no_main]

mod memory;

use std::path::PathBuf;
use std::sync::LazyLock;

static FILE: LazyLock<PathBuf> = LazyLock::new(|| memory::path(".gguf"));

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    std::fs::write(&*FILE, bytes).expect("a file in memory");
    match warden_builder::gguf::read(&FILE) {
        Ok(facts) => {
            // Each value needs at least a byte.
            let numbers: usize = facts.numbers.values().map(Vec::len).sum();
            assert!(numbers + facts.texts.len() + facts.tensors.len() <= bytes.len());
        }
        Err(problem) => assert!(problem.to_string().contains("warden-fuzz-"), "{problem}"),
    }
});
