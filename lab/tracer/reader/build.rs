//! Compiles the tracer, so that the program embeds it and stays a single file.
//!
//! Cargo cannot yet embed a library of one crate in another. The tracer has no dependencies, so rustc alone
//! compiles it, with Cargo's target and linker. If that fails (rustc has no standard library for the target),
//! the program is built without the tracer, and says so on a request for tracing.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs, io};

/// Names the file `libgcc_s.so.1` to link the tracer with, for linkers that do not do so themselves.
const UNWINDER_VARIABLE: &str = "WARDEN_TRACER_UNWINDER";

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let variable = |name: &str| env::var(name).unwrap_or_default();
    let source = Path::new(&variable("CARGO_MANIFEST_DIR")).join("../src");
    println!("cargo::rerun-if-changed={}", source.display());
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed={UNWINDER_VARIABLE}");
    let library = PathBuf::from(variable("OUT_DIR")).join("libwarden_tracer.so");
    fs::write(&library, b"")?;

    let processor = variable("CARGO_CFG_TARGET_ARCH");
    let able =
        variable("CARGO_CFG_TARGET_OS") == "linux" && ["x86_64", "aarch64"].contains(&processor.as_str());
    if able {
        // Servers link to glibc, even if the program's target is musl.
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
    // Stacks are walked from inside the tracer, so its functions need unwind tables.
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
    // The tracer defines some functions of the unwinder itself, so it must link the unwinder as a library. zig would
    // link its own one statically, and then each of these functions is there twice.
    if let Some(unwinder) = env::var_os(UNWINDER_VARIABLE) {
        let mut option = std::ffi::OsString::from("link-arg=");
        option.push(unwinder);
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
