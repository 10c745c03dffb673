//! The program itself starts. That this test is here has cargo build it with whatever else is tested, in one go: the end-to-end tests, which
//! are in a package of their own, find it made.

use std::process::Command;

#[test]
fn the_program_says_its_version() {
    let told = Command::new(env!("CARGO_BIN_EXE_llama-warden")).arg("--version").output().unwrap();
    let told = String::from_utf8(told.stdout).unwrap();
    assert!(told.starts_with(concat!("llama-warden ", env!("CARGO_PKG_VERSION"))), "{told}");
}
