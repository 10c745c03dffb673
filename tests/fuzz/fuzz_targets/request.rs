//! Any bytes of a client: what passes arrives as exactly one request, the same, without a field of one connection.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Some((size, bytes)) = bytes.split_first() {
        warden_gateway::fuzzing::pieces(bytes, usize::from(*size));
        warden_gateway::fuzzing::request(bytes);
    }
});
