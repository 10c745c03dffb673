//! Any bytes of a client: an accepted request arrives as exactly one request, unchanged, without connection
//! fields.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Some((size, bytes)) = bytes.split_first() {
        warden_gateway::fuzzing::pieces(bytes, usize::from(*size));
        warden_gateway::fuzzing::request(bytes);
    }
});
