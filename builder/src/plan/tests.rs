//! Changes that alter a build's id, and changes that do not.

use std::path::PathBuf;

use warden_patches::planned::{PlannedFix, PlannedSeam};
use warden_patches::{PatchStatus, SourceRevision};

use super::*;
use crate::toolchain::BuildTool;

/// A plan with invented inputs.
pub(crate) fn plan(options: &[&str]) -> Result<BuildPlan> {
    let options: Vec<String> = options.iter().map(|option| (*option).to_owned()).collect();
    BuildPlan::new(ingredients(), &options)
}

fn ingredients() -> PlanInputs {
    let chosen =
        ChosenBackend { backend: ComputeBackend::Cpu, why: String::new(), toolkit: None, gpu: Vec::new() };
    PlanInputs {
        source: found(),
        compilers: compilers(),
        chosen,
        arch: CpuTarget::Portable,
        patches: Vec::new(),
        searched: BTreeMap::new(),
        offers: SourceFeatures::default(),
        amx: None,
        tools: ExtraTools { npm: Err(String::new()), library: None },
    }
}

pub(crate) fn with_gpu(backend: ComputeBackend, gpu: &[&str], path: &str, version: &str) -> BuildPlan {
    let tool = BuildTool { path: path.into(), version: version.into() };
    let chosen = ChosenBackend {
        backend,
        why: "an NVIDIA device is there".into(),
        toolkit: Some(GpuToolkit { tool, home: "/usr/local/cuda".into() }),
        gpu: gpu.iter().map(|name| (*name).to_owned()).collect(),
    };
    BuildPlan::new(PlanInputs { chosen, ..ingredients() }, &[]).unwrap()
}

fn planned_set(edits: &str) -> PlannedSet {
    let fix = |fix: &str, status| PlannedFix {
        life: None,
        fix: fix.into(),
        status,
        reason: (status == PatchStatus::NotApplicable).then(|| "there is no graph cache".into()),
        marker: String::new(),
    };
    PlannedSet {
        set: "cuda-memory".into(),
        status: PatchStatus::Unverified,
        reasons: vec!["a.cu:3: seam `x`: it is new".into()],
        fixes: vec![
            fix("pool-purge", PatchStatus::Unverified),
            fix("graph-cache-cap", PatchStatus::NotApplicable),
        ],
        seams: vec![PlannedSeam { seam: "x".into(), hash: "00".into(), known: None }],
        hooks: Vec::new(),
        edits: edits.into(),
        allowed_unverified: true,
        proof: None,
        own: Vec::new(),
    }
}

fn found() -> ExaminedSource {
    ExaminedSource {
        given: "/somewhere/x.tar.gz".into(),
        kind: "archive".into(),
        identity: "archive-sha256:00".into(),
        root: "x/vendor/llama.cpp".into(),
        server: "tools/server".into(),
        revision: SourceRevision { commit: Some("0c1e570980000000".into()), build_number: None },
    }
}

fn compilers() -> BuildCompilers {
    let tool = |name: &str| BuildTool {
        path: PathBuf::from("/usr/bin").join(name),
        version: format!("{name} 12.2.0"),
    };
    BuildCompilers { c: tool("cc"), cxx: tool("c++"), target: "x86_64-linux-gnu".into(), cpu: String::new() }
}

#[test]
fn the_name_of_a_build_is_stable_across_releases() {
    assert_eq!(plan(&[]).unwrap().id.to_string(), "90b61a0bd726c6ae");
}

#[test]
fn the_name_depends_on_everything_that_shapes_the_binary() {
    let base = plan(&[]).unwrap();
    let mut names = vec![base.id.clone(), plan(&["GGML_LTO=ON"]).unwrap().id];
    let changes: [fn(&mut BuildRecipe); 11] = [
        |recipe| recipe.source.push('1'),
        |recipe| recipe.root.push('1'),
        |recipe| recipe.patch_set = "server".into(),
        |recipe| recipe.arch = CpuTarget::Native,
        |recipe| recipe.c.push('1'),
        |recipe| recipe.cxx.push('1'),
        |recipe| recipe.target.push('1'),
        |recipe| recipe.cpu.push('1'),
        |recipe| recipe.backend = ComputeBackend::Cuda,
        |recipe| recipe.toolkit.push('1'),
        |recipe| recipe.gpu.push("90".into()),
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
    let mut moved = ingredients();
    moved.source.given = "/elsewhere/y.tar.gz".into();
    moved.compilers.cxx.path = "/opt/bin/c++".into();
    moved.chosen.why = "for another reason".into();
    assert_eq!(BuildPlan::new(moved, &[]).unwrap().id, plan(&[]).unwrap().id);
    let cuda = |path| with_gpu(ComputeBackend::Cuda, &["90"], path, "nvcc 13.0.88").id;
    assert_eq!(cuda("/usr/bin/nvcc"), cuda("/opt/cuda/bin/nvcc"));
}

#[test]
fn options_of_the_user_come_last_so_that_they_win() {
    let plan = plan(&["-DCMAKE_BUILD_TYPE=Debug", "GGML_LTO:BOOL=ON"]).unwrap();
    let last: Vec<&str> = plan.recipe.cmake.iter().rev().take(2).map(String::as_str).collect();
    assert_eq!(last, ["-DGGML_LTO:BOOL=ON", "-DCMAKE_BUILD_TYPE=Debug"]);
}

#[test]
fn options_that_would_break_the_result_are_refused_with_the_reason() {
    let refused = [
        "GGML_LTO",
        "=x",
        "-D-S=x",
        "A B=x",
        "A=b\nc",
        "BUILD_SHARED_LIBS=on",
        "-DGGML_NATIVE:BOOL=OFF",
        "CMAKE_CXX_COMPILER=clang++",
        "GGML_CUDA=ON",
        "CMAKE_CUDA_ARCHITECTURES=90",
        "AMDGPU_TARGETS=gfx1201",
        "CMAKE_CUDA_COMPILER=/x/nvcc",
        "LLAMA_BUILD_SERVER=OFF",
    ];
    let told = refused.map(|option| format!("{}\n", plan(&[option]).unwrap_err()));
    insta::assert_snapshot!(told.concat());
    plan(&["BUILD_SHARED_LIBS=OFF"]).unwrap();
}

#[test]
fn a_plan_survives_json_and_prints_its_name_first() {
    let plan = plan(&[]).unwrap();
    let json = serde_json::to_string(&plan).unwrap();
    assert_eq!(serde_json::from_str::<BuildPlan>(&json).unwrap(), plan);
    insta::assert_snapshot!(plan.to_string());
}

#[test]
fn each_backend_gives_cmake_its_options_before_those_of_the_user() {
    for (backend, gpu, wanted) in [
        (
            ComputeBackend::Cuda,
            &["86", "89-real"][..],
            &["-DGGML_CUDA=ON", "-DCMAKE_CUDA_ARCHITECTURES=86;89-real"][..],
        ),
        (
            ComputeBackend::Hip,
            &["gfx1100", "gfx1201"],
            &["-DGGML_HIP=ON", "-DGPU_TARGETS=gfx1100;gfx1201", "-DAMDGPU_TARGETS=gfx1100;gfx1201"],
        ),
        (ComputeBackend::Cuda, &[], &["-DLLAMA_BUILD_COMMIT=0c1e57098", "-DGGML_CUDA=ON"]),
        (ComputeBackend::Vulkan, &[], &["-DGGML_VULKAN=ON"]),
    ] {
        let plan = with_gpu(backend, gpu, "/x", "1");
        assert!(
            plan.recipe.cmake.ends_with(&wanted.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>())
        );
    }
}

#[test]
fn a_plan_for_a_gpu_tells_why_and_with_what() {
    let plan = with_gpu(ComputeBackend::Cuda, &["90-real"], "/opt/cuda/bin/nvcc", "nvcc 13.0.88");
    insta::assert_snapshot!(plan.to_string());
}

#[test]
fn a_plan_with_patches_names_the_sets_and_tells_each_fix() {
    let patches = vec![planned_set("0123456789ab"), PlannedSet { set: "other".into(), ..planned_set("") }];
    let plan = BuildPlan::new(PlanInputs { patches, ..ingredients() }, &[]).unwrap();
    assert_eq!(plan.recipe.patch_set, "cuda-memory@0123456789ab");
    assert_eq!(plan.fixes(), ["pool-purge"]);
    insta::assert_snapshot!(plan.to_string());
    let json = serde_json::to_string(&plan).unwrap();
    assert_eq!(serde_json::from_str::<BuildPlan>(&json).unwrap(), plan);
}

#[test]
fn other_places_to_search_for_headers_make_another_build() {
    let searched = BTreeMap::from([("CPATH".to_owned(), "/opt/include".to_owned())]);
    let plan = |searched| BuildPlan::new(PlanInputs { searched, ..ingredients() }, &[]).unwrap();
    assert_ne!(plan(searched).id, plan(BTreeMap::new()).id);
}

#[test]
fn a_plan_without_amx_says_why_and_undefines_what_ggml_asks_for_behind_the_users_own_flags() {
    let why = AmxKernels::LeftOut("c++ 12 drops a part of the tile configuration".to_owned());
    let user = ["-DCMAKE_CXX_FLAGS=-O2".to_owned(), "GGML_AMX_INT8=ON".to_owned()];
    let without = BuildPlan::new(PlanInputs { amx: Some(why.clone()), ..ingredients() }, &user).unwrap();
    let undefined = "-U__AMX_TILE__ -U__AMX_INT8__ -U__AMX_BF16__";
    let value = |name| option_value(&without.recipe.cmake, name).unwrap();
    assert_eq!(value("CMAKE_CXX_FLAGS"), format!("-O2 {undefined}"));
    assert_eq!((value("CMAKE_C_FLAGS"), value("GGML_AMX_INT8")), (undefined, "OFF"));
    assert!(without.to_string().contains("\nAMX       left out: c++ 12 drops"), "{without}");
    let json = serde_json::to_string(&without).unwrap();
    assert_eq!(serde_json::from_str::<BuildPlan>(&json).unwrap().amx, Some(why));

    let with =
        BuildPlan::new(PlanInputs { amx: Some(AmxKernels::Compiled), ..ingredients() }, &user).unwrap();
    let none = BuildPlan::new(ingredients(), &user).unwrap();
    assert_ne!(with.id, without.id);
    assert_eq!(with.id, none.id, "what was not looked for changes no name");
}
