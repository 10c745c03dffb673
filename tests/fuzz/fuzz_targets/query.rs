//! Any query: it is pairs of text, and an address made of them means the same.
//!
//! The product is a program without a library, so the file that reads queries is taken in here as it stands.
#![no_main]
#![allow(dead_code)]

#[cfg(test)]
#[path = "../../../proxy/app/src/mutated.rs"]
mod mutated;
#[path = "../../../proxy/app/src/admin/query.rs"]
mod query;

use query::{Query, address};

libfuzzer_sys::fuzz_target!(|text: &str| {
    let asked = Query::of(Some(text));
    if let Ok(mut read) = Query::read(Some(text)) {
        assert_eq!(read, asked);
        while let Some(name) = read.left().map(str::to_owned) {
            let value = read.take(&name).expect("it was there");
            let address = address("/page/memory", &[(&name, &value)]);
            assert!(
                address.bytes().all(|byte| byte.is_ascii_graphic() && !b"\"<>\\".contains(&byte)),
                "{address}"
            );
            let again = Query::of(address.split_once('?').map(|(_, query)| query));
            assert_eq!(again.get(&name).unwrap_or_default(), value);
        }
    }
});
