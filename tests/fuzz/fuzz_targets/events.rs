//! An event stream in any parts: every byte passes once, in order, and counts are the same.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Some((head, bytes)) = bytes.split_at_checked(5) {
        warden_gateway::fuzzing::events(bytes, &head[..4], usize::from(head[4]));
    }
});
