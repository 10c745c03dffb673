//! Builds llama-server: `cargo run --release -p warden-builder --example build -- SOURCE FOLDER [portable|native]
//! [NAME=VALUE ...]`.
//!
//! SOURCE is a folder or an archive, or `sdist:VERSION:SHA256` for a pinned llama-cpp-python. Everything goes into
//! FOLDER.

use std::io::Write;
use std::path::Path;
use std::time::Duration;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use warden_builder::patch::Selection;
use warden_builder::{
    Arch, Backend, Builder, Dirs, Environment, Error, Event, Needs, Reporter, Request, Source, sdist,
};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [source, folder, arch, options @ ..] = arguments.as_slice() else {
        return Err("usage: build SOURCE FOLDER portable|native [NAME=VALUE ...]".into());
    };
    let begun = Instant::now();
    let (reporter, mut events) = Reporter::channel();
    let cancel = CancellationToken::new();
    let builder = Builder {
        dirs: Dirs { cache: Path::new(folder).join("cache"), data: Path::new(folder).join("data") },
        env: Environment::from_process(),
        memory: || None,
        reporter,
        cancel: cancel.clone(),
    };
    let work = async {
        let source = match source.split(':').collect::<Vec<_>>().as_slice() {
            ["sdist", version, sha256] => {
                let pin = sdist::Pin { version: (*version).to_owned(), sha256: (*sha256).to_owned() };
                Source::at(&builder.sdist(&pin).await?)?
            }
            _ => Source::at(Path::new(source))?,
        };
        let request = Request {
            source,
            backend: Backend::Cpu.into(),
            arch: if arch == "native" { Arch::Native } else { Arch::Portable }.into(),
            patches: Selection::default(),
            options: options.to_vec(),
            jobs: None,
            needs: Needs {
                disk: 2 << 30,
                memory: 1 << 30,
                memory_per_job: 700 << 20,
                memory_per_gpu_job: 2 << 30,
            },
            page_timeout: Duration::from_secs(600),
            verify_timeout: Duration::from_secs(60),
        };
        builder.build(&request).await
    };
    let shown = async {
        let mut out = std::io::stdout();
        while let Some(event) = events.recv().await {
            let seconds = begun.elapsed().as_secs_f64();
            let line = match event {
                Event::Planned(plan) => plan.to_string(),
                other => format!("{other:?}"),
            };
            writeln!(out, "{seconds:7.2} {line}").ok();
        }
    };
    tokio::pin!(work);
    let outcome = async {
        tokio::select! {
            outcome = &mut work => return outcome,
            _ = tokio::signal::ctrl_c() => cancel.cancel(),
        }
        // Cancelled: it cleans up and then ends by itself.
        work.await
    };
    let outcome = tokio::select! {
        outcome = outcome => outcome,
        () = shown => Err(Error::Cancelled),
    };
    match outcome {
        Ok(built) => {
            writeln!(std::io::stdout(), "{:7.2} {}", begun.elapsed().as_secs_f64(), built.binary.display())?;
        }
        Err(error) => return Err(format!("{error}\nhint: {:?}", error.hint()).into()),
    }
    Ok(())
}
