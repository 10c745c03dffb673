//! Verification of programs that are no llama-server. Every build verifies a real one.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use super::*;

fn program(folder: &Path, script: &str) -> PathBuf {
    let path = folder.join("server");
    fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path
}

async fn failed(script: &str, timeout: Duration) -> BuilderError {
    let folder = tempfile::tempdir().unwrap();
    let binary = program(folder.path(), script);
    verify(&binary, timeout, &EventReporter::silent(), &CancellationToken::new()).await.unwrap_err()
}

const LONG: Duration = Duration::from_secs(60);

#[tokio::test]
async fn a_server_that_ends_is_told_with_its_last_lines() {
    let error = failed("echo unknown flag >&2; exit 3", LONG).await;
    let message = error.to_string();
    assert!(message.contains("`health`") && message.contains("exit status: 3\nunknown flag"), "{message}");
    assert!(error.hint().is_none());
}

#[tokio::test]
async fn a_server_for_another_cpu_comes_with_a_hint() {
    let error = failed("kill -ILL $$", LONG).await;
    assert!(error.hint().unwrap().contains("--arch portable"), "{error}");
}

#[tokio::test]
async fn a_server_that_never_answers_is_given_up() {
    let message = failed("echo thinking; exec sleep 600", Duration::from_millis(200)).await.to_string();
    assert!(message.contains("no answer within 200ms\nthinking"), "{message}");
}

#[tokio::test]
async fn a_file_that_cannot_be_run_is_no_server() {
    let binary = Path::new("/nonexistent/llama-server");
    let error = verify(binary, LONG, &EventReporter::silent(), &CancellationToken::new()).await.unwrap_err();
    assert!(error.to_string().contains("/nonexistent/llama-server cannot be run"), "{error}");
}

#[tokio::test]
async fn a_verification_can_be_cancelled() {
    let folder = tempfile::tempdir().unwrap();
    let binary = program(folder.path(), "exec sleep 600");
    let cancel = CancellationToken::new();
    cancel.cancel();
    let error = verify(&binary, LONG, &EventReporter::silent(), &cancel).await.unwrap_err();
    assert!(matches!(error, BuilderError::Cancelled));
}
