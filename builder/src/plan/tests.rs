//! What changes a build's name and what does not.

use std::path::PathBuf;

use super::*;
use crate::source::Revision;
use crate::toolchain::Tool;

/// A plan of made-up ingredients.
pub(crate) fn plan(options: &[&str]) -> Result<Plan> {
    let options: Vec<String> = options.iter().map(|option| (*option).to_owned()).collect();
    Plan::new(found(), compilers(), Backend::Cpu, Arch::Portable, &options)
}

fn found() -> Found {
    Found {
        given: "/somewhere/x.tar.gz".into(),
        kind: "archive".into(),
        identity: "archive-sha256:00".into(),
        root: "x/vendor/llama.cpp".into(),
        server: "tools/server".into(),
        revision: Revision { commit: Some("0c1e570980000000".into()), build_number: None },
    }
}

fn compilers() -> Compilers {
    let tool =
        |name: &str| Tool { path: PathBuf::from("/usr/bin").join(name), version: format!("{name} 12.2.0") };
    Compilers { c: tool("cc"), cxx: tool("c++"), target: "x86_64-linux-gnu".into(), cpu: String::new() }
}

#[test]
fn the_name_of_a_build_is_stable_across_releases() {
    assert_eq!(plan(&[]).unwrap().id.to_string(), "90b61a0bd726c6ae");
}

#[test]
fn the_name_depends_on_everything_that_shapes_the_binary() {
    let base = plan(&[]).unwrap();
    let mut names = vec![base.id.clone(), plan(&["GGML_LTO=ON"]).unwrap().id];
    let changes: [fn(&mut Recipe); 8] = [
        |recipe| recipe.source.push('1'),
        |recipe| recipe.root.push('1'),
        |recipe| recipe.patch_set = "server".into(),
        |recipe| recipe.arch = Arch::Native,
        |recipe| recipe.c.push('1'),
        |recipe| recipe.cxx.push('1'),
        |recipe| recipe.target.push('1'),
        |recipe| recipe.cpu.push('1'),
    ];
    for change in changes {
        let mut recipe = base.recipe.clone();
        change(&mut recipe);
        names.push(recipe.id().unwrap());
    }
    let count = names.len();
    names.sort();
    names.dedup();
    assert_eq!(names.len(), count);
}

#[test]
fn the_name_does_not_depend_on_where_things_lie() {
    let mut moved = found();
    moved.given = "/elsewhere/y.tar.gz".into();
    let mut tools = compilers();
    tools.cxx.path = "/opt/bin/c++".into();
    let moved = Plan::new(moved, tools, Backend::Cpu, Arch::Portable, &[]).unwrap();
    assert_eq!(moved.id, plan(&[]).unwrap().id);
}

#[test]
fn options_of_the_user_come_last_so_that_they_win() {
    let plan = plan(&["-DCMAKE_BUILD_TYPE=Debug", "GGML_LTO:BOOL=ON"]).unwrap();
    let last: Vec<&str> = plan.recipe.cmake.iter().rev().take(2).map(String::as_str).collect();
    assert_eq!(last, ["-DGGML_LTO:BOOL=ON", "-DCMAKE_BUILD_TYPE=Debug"]);
}

#[test]
fn options_that_would_break_the_result_are_refused_with_the_reason() {
    for (option, why) in [
        ("GGML_LTO", "NAME=VALUE"),
        ("=x", "NAME=VALUE"),
        ("-D-S=x", "NAME=VALUE"),
        ("A B=x", "NAME=VALUE"),
        ("A=b\nc", "line break"),
        ("BUILD_SHARED_LIBS=on", "one static binary"),
        ("-DGGML_NATIVE:BOOL=OFF", "--arch"),
        ("CMAKE_CXX_COMPILER=clang++", "CXX"),
        ("LLAMA_BUILD_SERVER=OFF", "llama-server"),
    ] {
        let message = plan(&[option]).unwrap_err().to_string();
        assert!(message.contains(why), "{message}");
    }
    plan(&["BUILD_SHARED_LIBS=OFF"]).unwrap();
}

#[test]
fn a_plan_survives_json_and_prints_its_name_first() {
    let plan = plan(&[]).unwrap();
    let json = serde_json::to_string(&plan).unwrap();
    assert_eq!(serde_json::from_str::<Plan>(&json).unwrap(), plan);
    assert!(plan.to_string().starts_with(&format!("build     {}\n", plan.id)));
}
