//! Compiles the rendered sidecar with the structs of real trees, in a temporary folder.

use std::ffi::OsStr;
use std::path::Path;
use std::process::{Command, Stdio};

use warden_patches::scan::{CodeContainer, ContainerKind, ContainerSearch, ScannedSource};
use warden_patches::{FolderTree, PatchStatus, SetCatalogue, SourceRevision, SourceTree, judge};
use warden_rig::sdists::ERAS;
use warden_rig::{Context as _, Outcome, Trouble};

use super::build::{compiler, tree_includes};

const BACKEND: [&str; 2] = ["ggml/src/ggml-cuda/ggml-cuda.cu", "ggml/src/ggml-cuda.cu"];
const CONTEXT: [&str; 1] = ["ggml/src/ggml-cuda/common.cuh"];
const GRAPH: [&str; 2] = ["ggml/src/ggml-cuda/graph.cuh", "ggml/src/ggml-cuda/common.cuh"];

const SIDECAR: &str = "llama-warden-cuda.cuh";
const LOCK: &str = "#define LLAMA_WARDEN_HAS_GRAPH_LOCK 1";
const NO_LOCK: &str = "#define LLAMA_WARDEN_HAS_NO_GRAPH_LOCK 1";

struct Parts {
    graph: String,
    context: String,
    pool_leg: String,
    pool_vmm: String,
    /// Declaration of the capture counter, if there is one.
    counter: Option<&'static str>,
    has_key: bool,
    sidecar: String,
}

#[derive(Clone, Copy, Debug)]
struct Variant {
    graphs: bool,
    vmm: bool,
    /// True for the lock that the tree does not use.
    other_lock: bool,
}

const fn variant(graphs: bool, vmm: bool, other_lock: bool) -> Variant {
    Variant { graphs, vmm, other_lock }
}

const VARIANTS: [Variant; 6] = [
    variant(true, true, false),
    variant(true, false, false),
    variant(false, true, false),
    variant(false, false, false),
    variant(true, true, true),
    variant(false, false, true),
];

/// Text of a struct from the first of these files that has it.
fn text_of(tree: &dyn SourceTree, files: &[&str], name: &str) -> Result<Option<String>, Trouble> {
    let container = CodeContainer { kind: ContainerKind::Struct, name: name.to_owned() };
    for file in files {
        let Some(raw) = tree.read(file)? else { continue };
        let source = ScannedSource::new(raw);
        match source.find(&container) {
            ContainerSearch::All(found) => {
                if let Some(one) = found.first() {
                    let text = source.raw().get(one.start..one.end).context("a place in the file")?;
                    return Ok(Some(format!("{};\n", String::from_utf8_lossy(text))));
                }
            }
            ContainerSearch::Unsure { line, why } => {
                return Err(Trouble::new(format!("{file}:{line}: {why}")));
            }
        }
    }
    Ok(None)
}

fn parts(tree: &dyn SourceTree) -> Result<Parts, Trouble> {
    let need = |files: &[&str], name: &str| text_of(tree, files, name)?.context(format!("no struct {name}"));
    let catalogue = SetCatalogue::embedded()?;
    let judgement = judge(catalogue.require("cuda-memory")?, tree)?;
    if judgement.status == PatchStatus::Refused {
        let reasons: Vec<String> = judgement.reasons.iter().map(ToString::to_string).collect();
        return Err(Trouble::new(format!("cuda-memory is refused:\n{}", reasons.join("\n"))));
    }
    let edits = judgement.edits.context("edits")?;
    let sidecar = edits.0.iter().find(|edit| edit.path.ends_with(SIDECAR)).context("a sidecar")?;
    let mut code = None;
    for file in BACKEND {
        code = code.or(tree.read(file)?);
    }
    let code = ScannedSource::new(code.context("no ggml-cuda.cu")?).code().to_owned();
    let counter = [
        ("static std::atomic<int> ggml_cuda_lock_counter", "std::atomic<int>"),
        ("static int ggml_cuda_lock_counter", "int"),
    ];
    Ok(Parts {
        graph: need(&GRAPH, "ggml_cuda_graph")?,
        context: need(&CONTEXT, "ggml_backend_cuda_context")?,
        pool_leg: need(&BACKEND, "ggml_cuda_pool_leg")?,
        pool_vmm: need(&BACKEND, "ggml_cuda_pool_vmm")?,
        counter: counter.iter().find(|(text, _)| code.contains(text)).map(|(_, kind)| *kind),
        has_key: code.contains("ggml_cuda_graph_get_key"),
        sidecar: String::from_utf8(sidecar.after.clone())?,
    })
}

/// Returns the text for a variant, and the sidecar with its lock.
fn text(parts: &Parts, variant: Variant) -> (String, String) {
    let has_lock = parts.sidecar.contains(LOCK);
    let mut text = String::from("#include \"tree.h\"\n");
    if variant.graphs {
        text.push_str("#define USE_CUDA_GRAPH\n");
    }
    if variant.vmm {
        text.push_str("#define GGML_USE_VMM\n");
    }
    text.push_str(&parts.graph);
    text.push_str(&parts.context);
    text.push_str(&parts.pool_leg);
    if variant.vmm {
        text.push_str(&parts.pool_vmm);
    }
    if has_lock != variant.other_lock {
        let kind = parts.counter.unwrap_or("std::atomic<int>");
        text.push_str(
            "static std::mutex ggml_cuda_lock;\nstatic std::condition_variable ggml_cuda_lock_cv;\n",
        );
        text.extend(["static ", kind, " ggml_cuda_lock_counter;\n"]);
    }
    if parts.has_key {
        text.push_str(
            "static const void * ggml_cuda_graph_get_key(ggml_cgraph * graph) { return graph->nodes[0]; }\n",
        );
    }
    text.push_str(
        "#include \"llama-warden-cuda.cuh\"\n\
         void use(ggml_backend_cuda_context * context, ggml_cgraph * graph) {\n\
         llama_warden::compute_guard guard(context); guard.finish(graph); llama_warden::forget(context); }\n",
    );
    let sidecar = match (variant.other_lock, has_lock) {
        (false, _) => parts.sidecar.clone(),
        (true, true) => parts.sidecar.replacen(LOCK, NO_LOCK, 1),
        (true, false) => parts.sidecar.replacen(NO_LOCK, LOCK, 1),
    };
    (text, sidecar)
}

/// Compiles the sidecar with the structs of a llama.cpp in all variants.
pub(crate) fn compile_against(tree: &Path) -> Outcome {
    let revision = SourceRevision { commit: None, build_number: None };
    compile(&parts(&FolderTree::new(tree, revision)).context(tree.display())?).context(tree.display())
}

fn compile(parts: &Parts) -> Outcome {
    for variant in VARIANTS {
        let scratch = tempfile::tempdir()?;
        let (text, sidecar) = text(parts, variant);
        std::fs::write(scratch.path().join(SIDECAR), sidecar)?;
        std::fs::write(scratch.path().join("tree.cpp"), text)?;
        let output = Command::new(compiler())
            .args(["-std=c++17", "-fsyntax-only", "-Wall", "-Wextra", "-Wno-unused-function", "tree.cpp"])
            .args(tree_includes().iter().flat_map(|folder| [OsStr::new("-I"), folder.as_os_str()]))
            .current_dir(scratch.path())
            .stdin(Stdio::null())
            .output()
            .context("the C++ compiler")?;
        let said = String::from_utf8_lossy(&output.stderr);
        // Ignore warnings from the tree's own text.
        if !output.status.success() || said.contains(SIDECAR) {
            return Err(Trouble::new(format!("{variant:?}:\n{said}")));
        }
    }
    Ok(())
}

#[tokio::test]
async fn the_sidecar_compiles_with_the_structs_of_eighteen_months() -> Outcome {
    // The oldest and newest tree, and one in between; all of them at night.
    let step = if warden_rig::is_long() { 1 } else { 4 };
    for era in ERAS.iter().rev().step_by(step).chain(&ERAS[..1]) {
        let tree = era.tree().await?;
        compile_against(tree.path()).context(format!("llama-cpp-python {}", era.version))?;
    }
    Ok(())
}

#[tokio::test]
async fn a_struct_that_lost_what_the_sidecar_needs_is_noticed() -> Outcome {
    let tree = ERAS[0].tree().await?;
    let revision = SourceRevision { commit: None, build_number: None };
    let sound = parts(&FolderTree::new(tree.path(), revision))?;
    for (member, other) in [("streams[", "lanes["), ("cublas_handles", "handles"), ("pools", "ponds")] {
        let context = sound.context.replace(member, other);
        assert_ne!(context, sound.context, "{member}");
        let drifted = Parts {
            context,
            ..parts(&FolderTree::new(tree.path(), SourceRevision { commit: None, build_number: None }))?
        };
        let trouble = compile(&drifted).err().context(format!("{member} is gone and nobody noticed"))?;
        assert!(trouble.to_string().contains(SIDECAR), "{trouble}");
    }
    Ok(())
}

#[tokio::test]
async fn the_guard_of_the_second_user_of_graphs_is_placed_where_there_is_one() -> Outcome {
    let catalogue = SetCatalogue::embedded()?;
    let set = catalogue.require("cuda-memory")?;
    for (era, guards) in [(ERAS[0], 1), (ERAS[6], 2)] {
        let tree = era.tree().await?;
        let judgement =
            judge(set, &FolderTree::new(tree.path(), SourceRevision { commit: None, build_number: None }))?;
        let edits = judgement.edits.context(format!("{}: {:?}", era.version, judgement.reasons))?;
        let placed = edits.0.iter().flat_map(|edit| &edit.inserted);
        assert_eq!(
            placed.filter(|line| line.text.contains("compute_guard")).count(),
            guards,
            "{}",
            era.version
        );
    }
    Ok(())
}
