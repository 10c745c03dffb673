//! Compiles the tracer, so that the program can carry it: one file is enough wherever it goes.
//!
//! Cargo cannot yet make a library of one crate a resource of another. The tracer has no dependencies, so the compiler
//! alone can make it, with the target and the linker that Cargo has chosen. Where that fails (a target that the compiler has
//! no standard library for), the program is built without it and says so when it is asked to trace.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs, io};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let variable = |name: &str| env::var(name).unwrap_or_default();
    let source = Path::new(&variable("CARGO_MANIFEST_DIR")).join("../src");
    println!("cargo::rerun-if-changed={}", source.display());
    println!("cargo::rerun-if-changed=build.rs");
    let library = PathBuf::from(variable("OUT_DIR")).join("libwarden_tracer.so");
    fs::write(&library, b"")?;

    let processor = variable("CARGO_CFG_TARGET_ARCH");
    let able =
        variable("CARGO_CFG_TARGET_OS") == "linux" && ["x86_64", "aarch64"].contains(&processor.as_str());
    if able {
        // A server is linked with glibc, whatever we are linked with.
        let target = variable("TARGET").replace("-musl", "-gnu");
        if let Err(problem) = compile(&source.join("lib.rs"), &library, &target) {
            println!("cargo::warning=the tracer is left out, diagnose --trace will not work: {problem}");
            fs::write(&library, b"")?;
        }
    }
    Ok(())
}

fn compile(source: &Path, library: &Path, target: &str) -> io::Result<()> {
    let mut compiler = Command::new(env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()));
    compiler.args([
        "--crate-name",
        "warden_tracer",
        "--crate-type",
        "cdylib",
        "--edition",
        "2024",
        "--cap-lints",
        "allow",
    ]);
    compiler.args(["--target", target, "-o"]).arg(library);
    // Stacks are walked from within, so its own functions need their tables.
    for option in
        ["opt-level=3", "codegen-units=1", "panic=abort", "force-unwind-tables=yes", "strip=symbols"]
    {
        compiler.args(["-C", option]);
    }
    if let (Some(linker), true) = (env::var_os("RUSTC_LINKER"), env::var("TARGET").as_deref() == Ok(target)) {
        let mut option = std::ffi::OsString::from("linker=");
        option.push(linker);
        compiler.arg("-C").arg(option);
    }
    let ran = compiler.arg(source).output()?;
    if ran.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&ran.stderr);
    let line = said.lines().find(|line| line.starts_with("error")).unwrap_or("the compiler failed");
    Err(io::Error::other(line.to_owned()))
}
