//! Tests of the probe with the machine's own compiler and a replaced intrinsic, right and wrong.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use super::*;
use crate::build::tests::builder_with;
use crate::environment::BuildEnvironment;

/// A C++ compiler with a modified `_tile_loadconfig`, which declares that it reads `bytes` bytes.
fn compiler(folder: &Path, bytes: usize) -> PathBuf {
    let header = folder.join("other.h");
    let text = format!(
        "#include <immintrin.h>\n\
         #define _tile_loadconfig(from) __asm__ volatile(\"ldtilecfg %0\" :: \"m\"(*(const char(*)[{bytes}])(from)))\n"
    );
    fs::write(&header, text).unwrap();
    // The compiler also gets assembly, for which the header must be omitted.
    let script = format!(
        "case \"$*\" in *.cpp*) exec c++ -include {} \"$@\";; esac\nexec c++ \"$@\"",
        header.display()
    );
    program(folder, "c++", &script)
}

fn program(folder: &Path, name: &str, script: &str) -> PathBuf {
    let path = folder.join(name);
    fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path
}

fn environment() -> BuildEnvironment {
    BuildEnvironment { path: "/usr/bin:/bin".into(), ..BuildEnvironment::default() }
}

async fn looked(cxx: &Path) -> TileCode {
    let folder = tempfile::tempdir().unwrap();
    let found = check_tile_code(&builder_with(environment(), folder.path()), cxx).await.unwrap();
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "nothing is left of the probe");
    found
}

#[cfg(target_arch = "x86_64")]
#[tokio::test]
async fn a_compiler_that_reads_all_of_the_configuration_keeps_it_and_one_that_reads_eight_bytes_drops_it() {
    let folder = tempfile::tempdir().unwrap();
    assert_eq!(looked(&compiler(folder.path(), 64)).await, TileCode::Kept);
    assert_eq!(looked(&compiler(folder.path(), 8)).await, TileCode::Dropped);
}

#[tokio::test]
async fn a_compiler_that_does_not_know_tiles_is_no_answer() {
    let folder = tempfile::tempdir().unwrap();
    let cxx = program(folder.path(), "c++", "echo unrecognized option -mamx-tile >&2; exit 1");
    assert!(matches!(looked(&cxx).await, TileCode::Unknown(why) if why.contains("-mamx-tile")));
}

#[tokio::test]
async fn kernels_for_amx_are_compiled_where_the_compiler_says_so_for_this_processor_or_by_flags() {
    let folder = tempfile::tempdir().unwrap();
    let cxx = program(
        folder.path(),
        "c++",
        "case \" $* \" in *' -march=native '*|*' -mamx-int8 '*) echo '#define __AMX_INT8__ 1';; *' -mbad '*) exit 1;; esac",
    );
    let tool = crate::toolchain::BuildTool { path: cxx, version: "1".into() };
    let compilers =
        BuildCompilers { c: tool.clone(), cxx: tool, target: "x86_64-linux-gnu".into(), cpu: String::new() };
    let ask = async |compilers: &BuildCompilers, arch, flags| {
        compiles_amx(&builder_with(environment(), folder.path()), compilers, arch, flags).await.unwrap()
    };
    assert!(ask(&compilers, CpuTarget::Native, "").await);
    assert!(!ask(&compilers, CpuTarget::Portable, "").await);
    assert!(ask(&compilers, CpuTarget::Portable, "-O2 -mamx-int8").await);
    assert!(!ask(&compilers, CpuTarget::Portable, "-mbad").await);
    let arm = BuildCompilers { target: "aarch64-linux-gnu".into(), ..compilers };
    assert!(!ask(&arm, CpuTarget::Native, "").await);
}

#[test]
fn each_load_of_a_configuration_becomes_a_copy_that_changes_no_register() {
    let code = "f:\n\tmovl $1, %eax\n\tldtilecfg\t-72(%rsp,%rcx,2)\n\tret\n";
    let text = replace_tile_loads(code).unwrap();
    assert!(
        text.contains("\tleaq -72(%rsp,%rcx,2), %rax\n\tmovq 0(%rax), %rcx\n") && !text.contains("ldtilecfg")
    );
    assert!(text.contains("\tmovq 56(%rax), %rcx\n\tmovq %rcx, seen+56(%rip)\n"), "{text}");
    assert!(text.ends_with("\tmovq kept_rax(%rip), %rax\n\tmovq kept_rcx(%rip), %rcx\n\tret\n"), "{text}");
    assert_eq!(replace_tile_loads("f:\n\tret\n"), None);
}
