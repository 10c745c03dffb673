//! Finding programs in temporary folders.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use super::*;
use crate::build::tests::builder_with;

/// A folder with programs that print a text.
fn path_with(programs: &[(&str, &str)]) -> (tempfile::TempDir, BuildEnvironment) {
    let folder = tempfile::tempdir().unwrap();
    for (name, script) in programs {
        let path = folder.path().join(name);
        fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    }
    let env = BuildEnvironment { path: folder.path().into(), ..BuildEnvironment::default() };
    (folder, env)
}

async fn found(env: &BuildEnvironment) -> Result<BuildCompilers> {
    find_compilers(&builder_with(env.clone(), Path::new("/nonexistent")), CpuTarget::Portable).await
}

#[tokio::test]
async fn a_missing_compiler_names_its_debian_package() {
    let (_folder, env) = path_with(&[("cc", "echo cc 1")]);
    let error = found(&env).await.unwrap_err();
    assert_eq!(error.to_string(), "not found: a C++ compiler (c++, g++, clang++)");
    assert_eq!(error.hint().unwrap(), "install it: apt install g++");
}

#[tokio::test]
async fn a_compiler_named_by_the_user_must_be_there() {
    let (_folder, mut env) = path_with(&[("cc", "echo cc 1"), ("c++", "echo c++ 1")]);
    env.cxx = Some("g++-99".into());
    assert!(found(&env).await.unwrap_err().to_string().contains("`g++-99`, named by CC or CXX"));
    env.cxx = Some("c++ -O0".into());
    assert!(found(&env).await.unwrap_err().to_string().contains("may name a program only"));
    env.cxx = Some("ccache c++".into());
    assert_eq!(found(&env).await.unwrap().cxx.version, "c++ 1");
}

#[tokio::test]
async fn a_compiler_that_fails_is_told_with_its_last_words() {
    let (_folder, env) = path_with(&[("cc", "echo cc 1"), ("c++", "echo broken >&2; exit 7")]);
    let message = found(&env).await.unwrap_err().to_string();
    assert!(message.contains("broken") && message.contains("exit status: 7"), "{message}");
}

#[tokio::test]
async fn another_cpu_is_another_toolchain_for_native_builds_only() {
    let script = |macros: &str| format!("case $1 in -march=native) echo '{macros}';; *) echo 1;; esac");
    let mut seen = Vec::new();
    for (macros, arch) in [
        ("AVX2", CpuTarget::Native),
        ("AVX512", CpuTarget::Native),
        ("AVX2", CpuTarget::Portable),
        ("AVX512", CpuTarget::Portable),
    ] {
        let (_folder, env) = path_with(&[("cc", "echo cc 1"), ("c++", &script(macros))]);
        seen.push(find_compilers(&builder_with(env, Path::new("/nonexistent")), arch).await.unwrap().cpu);
    }
    assert_ne!(seen[0], seen[1]);
    assert_eq!(seen[2..], [String::new(), String::new()]);
}

#[tokio::test]
async fn cmake_and_ninja_in_the_path_are_used() {
    let (folder, env) =
        path_with(&[("cmake", "echo cmake version 3.25.1"), ("ninja", "echo 1.11.1"), ("sccache", "")]);
    let builder = builder_with(env, Path::new("/nonexistent"));
    let found = find_drivers(&builder, ComputeBackend::Cpu).await.unwrap();
    assert_eq!(
        (found.cmake.version.as_str(), found.ninja.version.as_str()),
        ("cmake version 3.25.1", "1.11.1")
    );
    assert_eq!(found.launcher.unwrap(), folder.path().join("sccache"));
}

#[tokio::test]
async fn without_cmake_and_without_python_the_packages_are_named() {
    let (folder, env) = path_with(&[("cmake", "echo cmake version 3.13.4"), ("ninja", "echo 1.11.1")]);
    let builder = builder_with(env, folder.path());
    let error = find_drivers(&builder, ComputeBackend::Cpu).await.unwrap_err();
    assert_eq!(error.hint().unwrap(), "install it: apt install cmake ninja-build");
}

#[tokio::test]
async fn python_without_its_venv_module_names_the_package() {
    let (folder, env) = path_with(&[("python3", "echo 'ensurepip is not available' ; exit 1")]);
    let builder = builder_with(env, folder.path());
    let error = find_drivers(&builder, ComputeBackend::Cpu).await.unwrap_err();
    assert_eq!(error.hint().unwrap(), "install it: apt install python3-venv");
}

#[test]
fn versions_of_cmake_are_compared_by_number() {
    let enough = |version| is_new_enough(version, MIN_CMAKE);
    assert!(enough("cmake version 3.18.4"));
    assert!(enough("cmake version 4.0.0-rc1"));
    assert!(enough("something else"));
    assert!(!enough("cmake version 3.9.1"));
    assert!(!is_new_enough("cmake version 3.22.1", MIN_GPU_CMAKE));
}
