//! Any query consists of pairs of text, and an address made of them means the same.
//!
//! This target includes the source file that parses queries, because the crate around it takes long to build.
#![no_main]
#![allow(dead_code)]

#[cfg(test)]
#[path = "../../../proxy/admin/tests/fixtures/mutated.rs"]
mod mutated;
#[path = "../../../proxy/admin/src/query.rs"]
mod query;

use query::{QueryPairs, address_with_query};

libfuzzer_sys::fuzz_target!(|text: &str| {
    let asked = QueryPairs::lenient(Some(text));
    if let Ok(mut read) = QueryPairs::strict(Some(text)) {
        assert_eq!(read, asked);
        while let Some(name) = read.unknown_name().map(str::to_owned) {
            let value = read.take(&name).expect("it was there");
            let address = address_with_query("/page/memory", &[(&name, &value)]);
            assert!(
                address.bytes().all(|byte| byte.is_ascii_graphic() && !b"\"<>\\".contains(&byte)),
                "{address}"
            );
            let again = QueryPairs::lenient(address.split_once('?').map(|(_, query)| query));
            assert_eq!(again.get(&name).unwrap_or_default(), value);
        }
    }
});
