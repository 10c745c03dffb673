//! Any text as a file of another program is refused with a hint, or converted to TOML.
//!
//! The program has no library, so this target includes the source files of the import.
#![no_main]
#![allow(dead_code, unused_imports, unexpected_cfgs)]

#[path = "../../../proxy/app/src/exit.rs"]
mod exit;
#[path = "../../../proxy/app/src/cli/import/mod.rs"]
mod import;
#[cfg(test)]
#[path = "../../../proxy/admin/tests/fixtures/mutated.rs"]
mod mutated;
#[path = "../../../proxy/app/src/out.rs"]
mod out;

libfuzzer_sys::fuzz_target!(|text: &str| {
    for converted in import::import_each_format(text) {
        match converted {
            Ok(written) => assert!(written.parse::<toml::Table>().is_ok(), "{written}"),
            Err(failure) => {
                let told = failure.lines().join("\n");
                assert!(told.starts_with("error: ") && told.contains("hint: "), "{told}");
            }
        }
    }
});
