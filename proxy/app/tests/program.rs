//! Starts the program itself. Because of this test, cargo builds the program together with all tests, so that
//! the end-to-end tests of another package find it built.

use std::process::Command;

#[test]
fn the_program_says_its_version() {
    let told = Command::new(env!("CARGO_BIN_EXE_llama-warden")).arg("--version").output().unwrap();
    let told = String::from_utf8(told.stdout).unwrap();
    assert!(told.starts_with(concat!("llama-warden ", env!("CARGO_PKG_VERSION"))), "{told}");
}
