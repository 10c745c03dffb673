//! Possible changes of upstream, made in the newest tree: each is noticed before anything is written, and
//! reported with its place and the next step.

use std::path::Path;

use serde_json::Value;
use warden_patches::scan::{CodeContainer, ContainerKind, ContainerSearch, FoundContainer, ScannedSource};
use warden_rig::sdists::ERAS;
use warden_rig::{Context as _, Home, Outcome, Trouble};

use super::{differing, json, patches, restore, rows, snapshot, text};

const BACKEND: &str = "ggml/src/ggml-cuda/ggml-cuda.cu";
const COMMON: &str = "ggml/src/ggml-cuda/common.cuh";
const QUEUE: &str = "tools/server/server-queue.cpp";
const COMPUTE: &str = "ggml_backend_cuda_graph_compute";
const CAPTURE: &str = "ggml_cuda_graph_evaluate_and_capture";
const UPDATE: &str = "ggml_cuda_graph_update_executable";

struct Change {
    what: &'static str,
    edit: fn(&Path) -> Outcome,
    /// Set that the change concerns, and its status; the other set stays verified.
    set: &'static str,
    status: &'static str,
    /// Words in the reason of every fix: place, cause and next step.
    words: &'static [&'static str],
}

const fn refused(what: &'static str, edit: fn(&Path) -> Outcome, words: &'static [&'static str]) -> Change {
    Change { what, edit, set: "cuda-memory", status: "refused", words }
}

const fn unverified(
    what: &'static str,
    edit: fn(&Path) -> Outcome,
    words: &'static [&'static str],
) -> Change {
    Change { what, edit, set: "cuda-memory", status: "unverified", words }
}

const CHANGES: [Change; 20] = [
    refused(
        "a member has another name",
        |tree| {
            swap(tree, COMMON, "cublas_handles", "blas_handles")?;
            swap(tree, BACKEND, "cublas_handles", "blas_handles")
        },
        &[
            "ggml/src/ggml-cuda/common.cuh:",
            "probe `cublas-handles`",
            "once exactly in struct `ggml_backend_cuda_context`; found: none",
            "look at `reset_cublas`",
        ],
    ),
    refused(
        "a computation ends in two places",
        |tree| {
            let early = "if (cgraph->n_nodes == 0) {\n        return GGML_STATUS_SUCCESS;\n    }\n    ggml_cuda_set_device(";
            swap_in(tree, BACKEND, COMPUTE, "ggml_cuda_set_device(", early)
        },
        &[
            "ggml/src/ggml-cuda/ggml-cuda.cu:",
            "probe `one-return`",
            "in function `ggml_backend_cuda_graph_compute`; found: 2, in lines ",
            "after another one the fixes would not run; give it a hook of its own",
        ],
    ),
    refused(
        "the function is in a file that no set knows",
        |tree| moved(tree, "ggml/src/ggml-cuda/compute.cu"),
        &[
            "ggml/src/ggml-cuda/ggml-cuda.cu: ",
            "in function `ggml_backend_cuda_graph_compute`, which is not there",
            "a new file belongs into `files`",
        ],
    ),
    refused(
        "the function is in another file",
        |tree| moved(tree, COMMON),
        &[
            "ggml/src/ggml-cuda/ggml-cuda.cu: ",
            "in function `ggml_backend_cuda_graph_compute`, which is not there",
            "it is in ggml/src/ggml-cuda/common.cuh:",
            "name that file first",
        ],
    ),
    refused(
        "the function has another name",
        |tree| swap(tree, BACKEND, COMPUTE, "ggml_backend_cuda_graph_run"),
        &[
            "ggml/src/ggml-cuda/ggml-cuda.cu: ",
            "in function `ggml_backend_cuda_graph_compute`, which is not there",
            "similar names there: ",
            "`ggml_backend_cuda_graph_run` in line ",
        ],
    ),
    unverified(
        "a statement of a struct is another one",
        |tree| swap(tree, COMMON, "int curr_stream_no = 0;", "int curr_stream_no = 1;"),
        &[
            "ggml/src/ggml-cuda/common.cuh:",
            "seam `context`: struct `ggml_backend_cuda_context` is a version that nobody has looked at (",
            "against b10528",
            "new: line ",
            "`int curr_stream_no = 1;`",
            "1 of its ",
        ],
    ),
    unverified(
        "graphs are launched on a stream of their own",
        |tree| {
            let (on_ours, on_another) = (", cuda_ctx->stream()));", ", ggml_cuda_graph_stream()));");
            let launch = |on: &str| format!("CUDA_CHECK(cudaGraphLaunch(graph->instance{on}");
            swap_in(tree, BACKEND, CAPTURE, &launch(on_ours), &launch(on_another))
        },
        &[
            "seam `capture`: function `ggml_cuda_graph_evaluate_and_capture` is a version",
            "graph->instance, ggml_cuda_graph_stre",
        ],
    ),
    unverified(
        "the counter of captures never falls",
        |tree| {
            swap_in(
                tree,
                BACKEND,
                CAPTURE,
                "ggml_cuda_lock_counter.fetch_sub(1",
                "ggml_cuda_lock_counter.fetch_sub(0",
            )
        },
        &["seam `capture`: function `ggml_cuda_graph_evaluate_and_capture` is a version", "1 of its "],
    ),
    unverified(
        "a graph is renewed in another way",
        |tree| swap_in(tree, BACKEND, UPDATE, "cudaGraphExecDestroy(", "ggml_cuda_graph_retire("),
        &[
            "seam `update`: function `ggml_cuda_graph_update_executable` is a version",
            "ggml_cuda_graph_retire(",
        ],
    ),
    refused(
        "another function launches graphs",
        |tree| {
            let end = "static void ggml_backend_cuda_graph_optimize(";
            let other = "static void ggml_backend_cuda_graph_replay(cudaGraphExec_t instance, cudaStream_t stream) {\n    \
                         CUDA_CHECK(cudaGraphLaunch(instance, stream));\n}\n\nstatic void ggml_backend_cuda_graph_optimize(";
            swap(tree, BACKEND, end, other)
        },
        &[
            "ggml/src/ggml-cuda/ggml-cuda.cu:",
            "probe `graph-launches`",
            "found: 1, in line ",
            "look at its stream and its lock",
        ],
    ),
    refused(
        "the pools are a map",
        |tree| {
            let array =
                "std::unique_ptr<ggml_cuda_pool> pools[GGML_CUDA_MAX_DEVICES][GGML_CUDA_MAX_STREAMS];";
            swap(
                tree,
                COMMON,
                array,
                "std::map<int, std::unique_ptr<ggml_cuda_pool>> pools[GGML_CUDA_MAX_DEVICES];",
            )
        },
        &POOLS,
    ),
    refused(
        "the pools are by stream and then by device",
        |tree| {
            let shape = "pools[GGML_CUDA_MAX_DEVICES][GGML_CUDA_MAX_STREAMS]";
            swap(tree, COMMON, shape, "pools[GGML_CUDA_MAX_STREAMS][GGML_CUDA_MAX_DEVICES]")
        },
        &POOLS,
    ),
    refused(
        "the lock has another name",
        |tree| swap(tree, BACKEND, "ggml_cuda_lock", "ggml_cuda_capture_lock"),
        &LOCK,
    ),
    refused(
        "the lock counts in another type",
        |tree| {
            let counter = "static std::atomic<int> ggml_cuda_lock_counter";
            swap(tree, BACKEND, counter, "static std::atomic<long> ggml_cuda_lock_counter")
        },
        &LOCK,
    ),
    refused(
        "a context is deleted in two places",
        |tree| {
            let both = "if (cuda_ctx->device < 0) {\n        delete cuda_ctx;\n        return;\n    }\n    delete cuda_ctx;";
            swap_in(tree, BACKEND, "ggml_backend_cuda_free", "delete cuda_ctx;", both)
        },
        &[
            "ggml/src/ggml-cuda/ggml-cuda.cu:",
            "hook `free`: the anchor `delete cuda_ctx;` is expected once in function `ggml_backend_cuda_free`",
            "found: 2, in lines ",
            "make the anchor longer, or add a hook",
        ],
    ),
    Change {
        what: "a wait is in milliseconds",
        edit: |tree| {
            swap_in(tree, QUEUE, "recv_with_timeout", "std::chrono::seconds(", "std::chrono::milliseconds(")
        },
        set: "server",
        status: "refused",
        words: &[
            "tools/server/server-queue.cpp:",
            "probe `seconds`",
            "in function `recv_with_timeout`; found: none",
            "see what the new one waits for",
        ],
    },
    refused(
        "a computation returns something else",
        |tree| {
            let head = "enum ggml_status ggml_backend_cuda_graph_compute(";
            swap(tree, BACKEND, head, "int ggml_backend_cuda_graph_compute(")
        },
        &[
            "ggml/src/ggml-cuda/ggml-cuda.cu",
            "probe `parameters`",
            "found: none",
            "look at ggml_backend_cuda_graph_compute",
        ],
    ),
    refused(
        "the other user of graphs has another name",
        |tree| swap(tree, BACKEND, "ggml_backend_cuda_graph_optimize", "ggml_backend_cuda_graph_prepare"),
        &OPTIMIZE,
    ),
    refused(
        "the other user of graphs hands on to a third",
        |tree| {
            let end = "static void ggml_backend_cuda_graph_optimize(";
            let third = "static bool ggml_backend_cuda_graph_peek(ggml_backend_cuda_context * cuda_ctx, const void * key) {\n    \
                         return ggml_cuda_graph_set_enabled(cuda_ctx, key);\n}\n\nstatic void ggml_backend_cuda_graph_optimize(";
            swap(tree, BACKEND, end, third)
        },
        &[
            "ggml/src/ggml-cuda/ggml-cuda.cu:",
            "probe `graph-users`",
            "found: 1, in line ",
            "it needs a guard as `optimize` has",
        ],
    ),
    refused(
        "somebody takes memory of a pool outside of a computation",
        |tree| {
            let end = "static void ggml_backend_cuda_graph_optimize(";
            let other = "static void ggml_backend_cuda_borrow(ggml_backend_cuda_context * cuda_ctx) {\n    \
                         ggml_cuda_pool_alloc<char> some(cuda_ctx->pool(), 1);\n}\n\nstatic void ggml_backend_cuda_graph_optimize(";
            swap(tree, BACKEND, end, other)
        },
        &[
            "ggml/src/ggml-cuda/ggml-cuda.cu:",
            "probe `pool-users`",
            "found: 1, in line ",
            "it needs a guard as `all-reduce` has",
        ],
    ),
];

const POOLS: [&str; 4] = [
    "ggml/src/ggml-cuda/common.cuh:",
    "probe `pools`",
    "once exactly in struct `ggml_backend_cuda_context`; found: none",
    "look at `ask_pools` and `purge_pools`",
];

const LOCK: [&str; 4] = [
    "ggml/src/ggml-cuda/ggml-cuda.cu:",
    "probe `lock-by-another-name`",
    "is expected at most once; found: ",
    "bring the new name over into the sidecar and into the probes",
];

const OPTIMIZE: [&str; 4] = [
    "ggml/src/ggml-cuda/ggml-cuda.cu:",
    "probe `graph-users`",
    "found: 1, in line ",
    "it needs a guard as `optimize` has",
];

fn swap(tree: &Path, file: &str, from: &str, to: &str) -> Outcome {
    let old = std::fs::read_to_string(tree.join(file))?;
    if !old.contains(from) {
        return Err(Trouble::new(format!(
            "{file} has no `{from}`: the invented change must be invented anew"
        )));
    }
    Ok(std::fs::write(tree.join(file), old.replace(from, to))?)
}

fn swap_in(tree: &Path, file: &str, function: &str, from: &str, to: &str) -> Outcome {
    let (old, found) = function_in(tree, file, function)?;
    let (head, rest) = old.split_at(found.start);
    let (body, tail) = rest.split_at(found.end - found.start);
    let new = body.replacen(from, to, 1);
    if new == body {
        return Err(Trouble::new(format!(
            "{function} has no `{from}`: the invented change must be invented anew"
        )));
    }
    Ok(std::fs::write(tree.join(file), [head, &new, tail].concat())?)
}

fn function_in(tree: &Path, file: &str, name: &str) -> Result<(String, FoundContainer), Trouble> {
    let old = std::fs::read_to_string(tree.join(file))?;
    let container = CodeContainer { kind: ContainerKind::Function, name: name.to_owned() };
    match ScannedSource::new(old.clone().into_bytes()).find(&container) {
        ContainerSearch::All(mut found) => Ok((old, found.pop().context(name)?)),
        ContainerSearch::Unsure { line, why } => Err(Trouble::new(format!("{file}:{line}: {why}"))),
    }
}

/// Moves the compute function to the end of another file.
fn moved(tree: &Path, to: &str) -> Outcome {
    let (old, found) = function_in(tree, BACKEND, COMPUTE)?;
    std::fs::write(tree.join(BACKEND), [&old[..found.start], &old[found.end..]].concat())?;
    let there = std::fs::read_to_string(tree.join(to)).unwrap_or_default();
    Ok(std::fs::write(tree.join(to), format!("{there}\n{}\n", &old[found.start..found.end]))?)
}

#[tokio::test]
async fn what_upstream_may_do_next_is_refused_with_a_reason_and_nothing_is_written() -> Outcome {
    let home = Home::new()?;
    let folder = ERAS[ERAS.len() - 1].tree().await?;
    let sound = snapshot(folder.path())?;
    for change in CHANGES {
        (change.edit)(folder.path()).context(change.what)?;
        noticed(&home, folder.path(), &change).await.context(change.what)?;
        restore(folder.path(), &sound)?;
    }
    let value = json(&home, &["check", "--source", text(folder.path())?], 0).await?;
    assert!(rows(&value).iter().all(|(_, status, _)| status == "verified"), "{value}");
    Ok(())
}

async fn noticed(home: &Home, tree: &Path, change: &Change) -> Outcome {
    let before = snapshot(tree)?;
    let source = ["--source", text(tree)?];
    let value = json(home, &[&["check"], &source[..]].concat(), 3).await?;
    let mut reasons = Vec::new();
    for (patch, status, reason) in rows(&value) {
        let concerned = patch.split('/').next() == Some(change.set);
        assert_eq!(
            status,
            if concerned { change.status } else { "verified" },
            "{}: {patch}: {reason}",
            change.what
        );
        if concerned {
            for word in change.words {
                assert!(reason.contains(word), "{}: {patch}: `{word}` is not in: {reason}", change.what);
            }
            assert!(!reason.contains('\n'), "one line: {reason}");
            reasons.push(reason);
        }
    }
    let unverified = change.status == "unverified";
    let allowed = [&source[..], &["--allow-unverified"]].concat();
    json(home, &[&["check"], &allowed[..]].concat(), if unverified { 0 } else { 3 }).await?;

    let ran = patches(home, &[&["apply"], &source[..]].concat(), 3).await?;
    let reason = reasons.first().context("a fix of the set")?;
    assert!(ran.stderr.contains(reason.as_str()), "{}: {reason}: {ran:?}", change.what);
    assert_eq!(ran.stderr.contains("then use --allow-unverified"), unverified, "{ran:?}");
    assert_eq!(differing(&before, &snapshot(tree)?), Vec::<&str>::new(), "{}", change.what);
    if unverified {
        let told = json(home, &[&["apply"], &allowed[..]].concat(), 0).await?;
        assert_eq!(told["outcome"], "written");
        assert_eq!(statuses(&told), ["cuda-memory unverified", "server verified"]);
        restore(tree, &before)?;
    } else {
        let told = json(home, &[&["apply"], &allowed[..]].concat(), 3).await?;
        assert_eq!(told["outcome"], "refused", "{}", change.what);
    }
    assert_eq!(differing(&before, &snapshot(tree)?), Vec::<&str>::new(), "{}", change.what);
    Ok(())
}

fn statuses(told: &Value) -> Vec<String> {
    let sets = told["sets"].as_array().map(Vec::as_slice).unwrap_or_default();
    let text = |set: &Value, key: &str| set[key].as_str().unwrap_or_default().to_owned();
    sets.iter().map(|set| format!("{} {}", text(set, "set"), text(set, "status"))).collect()
}
