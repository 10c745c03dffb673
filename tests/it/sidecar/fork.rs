//! An invented backend in the shape of `ik_llama.cpp`'s (`tests/sidecar/fork`): the patch set finds its
//! places, and the result compiles, without a fork's source and without CUDA.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::process::{Command, Stdio};

use warden_patches::Result as Judged;
use warden_patches::{PatchStatus, SetCatalogue, SetJudgement, SourceRevision, SourceTree, TreeEdits, judge};
use warden_rig::{Context as _, Outcome, Trouble};

use super::build::{compiler, folder, tree_includes};

const BACKEND: &str = "ggml/src/ggml-cuda.cu";
const COMMON: &str = "ggml/src/ggml-cuda/common.cuh";

struct Fork(BTreeMap<&'static str, String>);

impl Fork {
    fn new() -> Result<Self, Trouble> {
        let text = |name: &str| {
            let path = folder().join("fork").join(name);
            std::fs::read_to_string(&path).context(path.display())
        };
        Ok(Self([(BACKEND, text("ggml-cuda.cu")?), (COMMON, text("common.cuh")?)].into()))
    }

    fn judged(&self) -> Result<SetJudgement, Trouble> {
        Ok(judge(SetCatalogue::embedded()?.require("cuda-memory")?, self)?)
    }

    fn with(mut self, from: &str, to: &str) -> Result<Self, Trouble> {
        let text = self.0.get_mut(BACKEND).context("the backend")?;
        assert!(text.contains(from), "{from}");
        *text = text.replace(from, to);
        Ok(self)
    }
}

impl SourceTree for Fork {
    fn read(&self, path: &str) -> Judged<Option<Vec<u8>>> {
        Ok(self.0.get(path).map(|text| text.clone().into_bytes()))
    }

    fn revision(&self) -> SourceRevision {
        SourceRevision::default()
    }
}

/// Returns the edits. An invented backend has no known fingerprint, so the set can only be unverified.
fn edits(judgement: SetJudgement) -> Result<TreeEdits, Trouble> {
    let reasons: Vec<String> = judgement.reasons.iter().map(ToString::to_string).collect();
    assert_eq!(judgement.status, PatchStatus::Unverified, "{reasons:#?}");
    assert!(reasons.iter().all(|reason| reason.contains("seam `")), "{reasons:#?}");
    judgement.edits.context("edits")
}

#[tokio::test]
async fn a_patched_fork_compiles_and_holds_what_it_takes_from_another_thread() -> Outcome {
    let fork = Fork::new()?;
    let edits = edits(fork.judged()?)?;
    let placed: Vec<&str> =
        edits.0.iter().flat_map(|edit| &edit.inserted).map(|line| line.hook.as_str()).collect();
    let expected = ["invalidate-declared", "invalidate", "include", "free", "copy", "begin", "end"];
    assert_eq!(placed, expected);
    let scratch = tempfile::tempdir()?;
    std::fs::create_dir_all(scratch.path().join("ggml/src/ggml-cuda"))?;
    for (path, text) in &fork.0 {
        std::fs::write(scratch.path().join(path), text)?;
    }
    for edit in &edits.0 {
        std::fs::write(scratch.path().join(&edit.path), &edit.after)?;
    }
    for graphs in [true, false] {
        let output = Command::new(compiler())
            .args(["-std=c++17", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", "-x", "c++"])
            .args(graphs.then_some("-DUSE_CUDA_GRAPH"))
            .arg(BACKEND)
            .args(tree_includes().iter().flat_map(|folder| [OsStr::new("-I"), folder.as_os_str()]))
            .current_dir(scratch.path())
            .stdin(Stdio::null())
            .output()
            .context("the C++ compiler")?;
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(())
}

#[tokio::test]
async fn what_another_thread_does_to_graphs_without_a_hook_of_its_own_is_refused() -> Outcome {
    let cases = [
        // No lock protects the context that is cleared.
        ("ctx->cuda_graphs.clear();", "auto & c = *ctx; c.cuda_graphs.clear();", "probe `graph-users`"),
        // The hook holds the lock for one line only.
        (
            "extern \"C\" void ggml_backend_cuda_invalidate_graphs(const void * model) {",
            "extern \"C\" void ggml_backend_cuda_invalidate_graphs(const void * model) {\n    everybody()[model][0]->cuda_graphs.clear();",
            "probe `invalidated-once`",
        ),
        (
            "static const void * ggml_cuda_graph_get_key",
            "void forget_all(ggml_backend_cuda_context * ctx) { ctx->cuda_graphs.clear(); }\nstatic const void * ggml_cuda_graph_get_key",
            "probe `graph-users`",
        ),
        // A copy whose memory comes from elsewhere, although it uses one pool.
        (
            "        ggml_cuda_pool_alloc<half> tmp_src(cuda_ctx_src->pool());",
            "        ggml_cuda_pool_alloc<half> source(cuda_ctx_src->pool());",
            "hook `copy`",
        ),
    ];
    for (from, to, part) in cases {
        let judgement = Fork::new()?.with(from, to)?.judged()?;
        let reasons: Vec<String> = judgement.reasons.iter().map(ToString::to_string).collect();
        assert_eq!(judgement.status, PatchStatus::Refused, "{part}: {reasons:#?}");
        assert!(reasons.iter().any(|reason| reason.contains(part)), "{part}: {reasons:#?}");
    }
    Ok(())
}
