//! Output of `diagnose --trace`.

use std::path::{Path, PathBuf};
use std::time::Duration;

use warden_rig::home::Ran;
use warden_rig::{Context as _, Home, Outcome, Trouble, binaries};
use warden_tracer_reader::{PreloadObstacle, preload_obstacle};

use super::cc;

/// Runs `diagnose` with a fake-llama that leaks 3,000 KiB per request.
async fn diagnose(home: &mut Home, options: &[&str]) -> Result<Ran, Trouble> {
    diagnose_server(home, &binaries::fake_llama()?, options).await
}

/// Runs `diagnose` with another server, which may start that fake.
async fn diagnose_server(home: &mut Home, server: &Path, options: &[&str]) -> Result<Ran, Trouble> {
    home.file("model.gguf", "GGUF")?;
    let script = home.file("script.json", r#"{"leak_kib_per_request": 3000}"#)?;
    home.env.insert("FAKE_LLAMA_SCRIPT".into(), script.into());
    let server = server.to_string_lossy().into_owned();
    let before = ["diagnose", "--binary", &server, "--workload", "short-text"];
    let after = ["--", "-m", "model.gguf", "--cache-ram", "0"];
    home.warden([&before, options, &after].concat(), PATIENCE).await
}

const PATIENCE: Duration = Duration::from_secs(120);

#[tokio::test]
async fn a_diagnosis_that_is_traced_names_the_function_that_leaks() -> Outcome {
    let mut home = Home::new()?;
    let ran = diagnose(&mut home, &["--trace"]).await?;
    assert_eq!(ran.code, 3, "{}", ran.all());
    let line = |start: &str| ran.stdout.lines().find(|line| line.contains(start)).map(str::to_owned);
    let growth = line("short-text: host memory grows by").context(ran.all())?;
    assert!(growth.contains("2.9 MiB a request, of which counted allocations make up 2.9 MiB"), "{growth}");
    let place = line(" × malloc").context(ran.all())?;
    assert!(
        place.contains("2.9 MiB")
            && (place.contains("called in fake_llama::") || place.contains("called in <fake_llama::")),
        "{place}"
    );
    assert!(line(" < ").is_some_and(|chain| chain.contains("::leak::Leak")), "{}", ran.stdout);
    let json = diagnose(&mut home, &["--trace", "--json"]).await?;
    let json: serde_json::Value = serde_json::from_str(&json.stdout)?;
    let traced = &json["trace"][0];
    assert_eq!(
        (&traced["workload"], &traced["memories"][0]["memory"]),
        (&"short-text".into(), &"host".into())
    );
    let explained = traced["memories"][0]["explained"].as_f64().unwrap_or_default();
    assert!(explained > 0.9, "{explained}");
    assert!(json["legs"][0]["series"][0]["verdict"] == "leaking", "the report is there as without it");
    Ok(())
}

#[tokio::test]
async fn a_server_that_the_library_is_not_loaded_into_is_told_as_such() -> Outcome {
    let mut home = Home::new()?;
    // The shell is traced, but not the program that it becomes.
    let fake = binaries::fake_llama()?;
    let script = format!("#!/bin/sh\nunset LD_PRELOAD\nexec {} \"$@\"\n", fake.display());
    let script = home.program("server", &script)?;
    let ran = diagnose_server(&mut home, &script, &["--trace", "--requests", "8"]).await?;
    let told = ran.stdout.lines().find(|line| line.contains("The tracer was not loaded into the server"));
    let told = told.context(ran.all())?;
    assert!(told.starts_with("not traced: short-text.") && told.contains("TMPDIR"), "{told}");
    assert!(
        !ran.stdout.contains("counted allocations"),
        "what the shell allocated is not the server's: {}",
        ran.stdout
    );
    let json = diagnose_server(&mut home, &script, &["--trace", "--requests", "8", "--json"]).await?;
    let json: serde_json::Value = serde_json::from_str(&json.stdout)?;
    assert!(json["untraced"].as_str().is_some_and(|why| why.contains("not loaded")), "{}", json["untraced"]);
    Ok(())
}

/// A program linked in this way that claims to be llama-server.
fn linked(home: &Home, name: &str, how: &str) -> Result<PathBuf, Trouble> {
    let source =
        "#include <stdio.h>\nint main(void) { fputs(\"version: 8827 (abcdef1)\\n\", stderr); return 0; }\n";
    std::fs::write(home.path().join("none.c"), source)?;
    cc(&[how, "-o", name, "none.c"], home.path())?;
    Ok(home.path().join(name))
}

#[tokio::test]
async fn that_a_server_cannot_be_traced_is_told_before_it_is_started() -> Outcome {
    let mut home = Home::new()?;
    let alone = linked(&home, "alone", "-static")?;
    assert_eq!(preload_obstacle(&alone), Some(PreloadObstacle::Static));
    let ran = diagnose_server(&mut home, &alone, &["--trace"]).await?;
    let warning = ran.stderr.lines().find(|line| line.starts_with("warning: --trace:"));
    let warning = warning.context(ran.all())?;
    assert!(warning.contains("is linked statically") && warning.contains("glibc 2.34"), "{warning}");
    // Such a program is recognised without running.
    let musl = linked(&home, "musl", "-Wl,--dynamic-linker=/lib/ld-musl-x86_64.so.1")?;
    assert_eq!(preload_obstacle(&musl), Some(PreloadObstacle::Musl));
    Ok(())
}

#[tokio::test]
async fn a_library_that_is_not_there_is_named() -> Outcome {
    let mut home = Home::new()?;
    let ran = diagnose(&mut home, &["--trace", "--tracer", "nowhere.so"]).await?;
    assert!(ran.code == 1 && ran.stderr.contains("--tracer"), "{}", ran.all());
    Ok(())
}
