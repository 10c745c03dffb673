//! The scanner for `model` agrees with a full parser on every valid body.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Some((size, bytes)) = bytes.split_first() {
        warden_gateway::fuzzing::model(bytes, usize::from(*size));
    }
});
