//! Starts listening, or fails as the script says.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use crate::args::Args;
use crate::engine::Engine;
use crate::ledger::Ledger;
use crate::script::{Fail, Script};
use crate::{listen, say, signals};

const ABORT: i32 = 6;
const SEGV: i32 = 11;

pub(crate) async fn run(args: Args, script: Script) -> ExitCode {
    for line in &script.stderr {
        say::err(line);
    }
    let ledger = match Ledger::from_env() {
        Ok(ledger) => ledger,
        Err(wrong) => {
            say::err(&format!("fake-llama: {wrong}"));
            return ExitCode::FAILURE;
        }
    };
    if let Some(path) = args.slot_save_path.as_ref().filter(|_| script.no_slot_path) {
        let path = path.display();
        say::err(&format!("error while handling argument \"--slot-save-path\": not a directory: {path}"));
        return ExitCode::FAILURE;
    }
    // Errors that llama-server notices before it listens.
    if let Some(early @ (Fail::BadFlag | Fail::MissingLibrary | Fail::PortInUse)) = script.fail {
        return fail(early, &args, &script).await;
    }
    tokio::time::sleep(Duration::from_millis(script.bind_ms)).await;
    if script.never_bind {
        return std::future::pending().await;
    }
    let engine = Arc::new(Engine::new(args.clone(), script.clone(), ledger));
    if let Err(refused) = listen::bind_all(&engine).await {
        say::err(&refused);
        say::err("0.00.002.383 I srv    operator(): operator(): cleaning up before exit...");
        say::err("0.00.002.442 E srv  llama_server: exiting due to HTTP server error");
        return ExitCode::FAILURE;
    }
    say::err(&format!("0.00.004.858 I srv    load_model: loading model '{}'", model(&args).display()));
    tokio::time::sleep(Duration::from_millis(script.load_ms)).await;
    if !script.dies_without.is_empty() {
        signals::die_by(SEGV).await;
    }
    if let Some(late) = script.fail {
        return fail(late, &args, &script).await;
    }
    if args.model.as_ref().is_none_or(|path| !path.exists()) {
        return fail(Fail::MissingModel, &args, &script).await;
    }
    if let Some(reclaim) = &script.reclaim {
        engine.leak.can_go_back();
        engine.tasks.spawn(crate::reclaim::run(Arc::clone(&engine), reclaim.clone()));
    }
    engine.leak.grow(script.base_mib.saturating_mul(1 << 20));
    engine.vram.open(&script);
    engine.cache.announce();
    engine.report.open(script.report);
    engine.ready.set();
    let hours = Arc::clone(&engine);
    engine.tasks.spawn(async move { pass_hours(&hours).await });
    say::err("0.00.060.001 I srv  llama_server: model loaded");
    signals::until_stopped(&engine).await
}

/// Interval at which the hourly leak grows.
const PART: Duration = Duration::from_millis(10);

/// Leaks by the hour while the process serves.
async fn pass_hours(engine: &Engine) {
    let mut seen = tokio::time::Instant::now();
    loop {
        tokio::select! {
            () = engine.stopping.wait() => return,
            () = tokio::time::sleep(PART) => {}
        }
        let now = tokio::time::Instant::now();
        let micros = u64::try_from(now.duration_since(seen).as_micros()).unwrap_or(u64::MAX);
        seen = now;
        // One MiB per hour is 2^20 / 3.6e9 bytes per microsecond.
        let rate = u128::from(engine.script().leak_mib_per_hour) << 20;
        let bytes = u128::from(micros) * rate / 3_600_000_000;
        engine.leak.grow(u64::try_from(bytes).unwrap_or(u64::MAX));
    }
}

fn model(args: &Args) -> PathBuf {
    args.model.clone().unwrap_or_default()
}

async fn fail(how: Fail, args: &Args, script: &Script) -> ExitCode {
    let model = model(args);
    let model = model.display();
    let not_loaded = || {
        say::err(&format!("0.00.005.648 E srv    load_model: failed to load model, '{model}'"));
        say::err("0.00.005.649 I srv    operator(): operator(): cleaning up before exit...");
        say::err("0.00.006.002 E srv  llama_server: exiting due to model loading error");
    };
    let mut code = 1;
    match how {
        Fail::MissingModel => {
            say::err(&format!(
                "0.00.005.230 E gguf_init_from_file: failed to open GGUF file '{model}' (No such file or directory)"
            ));
            say::err(&format!(
                "0.00.005.518 E llama_model_load: error loading model: llama_model_loader: failed to load model from {model}"
            ));
            not_loaded();
        }
        Fail::CorruptModel => {
            say::err(
                "0.00.003.849 E gguf_init_from_reader: invalid magic characters: '?u??', expected 'GGUF'",
            );
            not_loaded();
        }
        Fail::BadFlag => say::err("error: invalid argument: --no-such-flag"),
        Fail::OutOfMemory => {
            say::err(
                "0.34.730.588 E ggml_aligned_malloc: insufficient memory (attempted to allocate 29298.14 MB)",
            );
            say::err(
                "0.34.730.602 E ggml_backend_cpu_buffer_type_alloc_buffer: failed to allocate buffer of size 30721323040",
            );
            say::err(&format!(
                "0.35.486.142 E cmn  common_init_: failed to create context with model '{model}'"
            ));
            not_loaded();
        }
        Fail::PortInUse => {
            say::err(&listen::cannot_bind(args.hosts.first().map_or("", String::as_str), args.port));
            say::err("0.00.002.442 E srv  llama_server: exiting due to HTTP server error");
        }
        Fail::MissingLibrary => {
            say::err(
                "llama-server: error while loading shared libraries: libcudart.so.12: cannot open shared object file: No such file or directory",
            );
            code = 127;
        }
        Fail::Abort => {
            say::err("ggml/src/ggml.c:1234: GGML_ASSERT(n_batch > 1) failed");
            signals::die_by(ABORT).await;
        }
        Fail::Silent => {}
    }
    ExitCode::from(script.exit_code.unwrap_or(code))
}
