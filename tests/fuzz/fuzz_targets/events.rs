//! An event stream in any pieces: every byte passes once, in order, and is counted alike.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Some((head, bytes)) = bytes.split_at_checked(5) {
        warden_gateway::fuzzing::events(bytes, &head[..4], usize::from(head[4]));
    }
});
