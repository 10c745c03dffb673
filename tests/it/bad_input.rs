//! Wrong input gives one clear error that names the cause and the remedy: exit code 2 for configuration and
//! usage, 1 for the rest, never a panic or a stack trace.

use std::os::unix::fs::PermissionsExt as _;
use std::time::Duration;

use serde_json::json;
use warden_rig::warden::{CHAT, SOON, Setup, chat};
use warden_rig::{Home, Outcome, Trouble};

/// Checks the exit code, that standard error contains all `words`, and the form of the error.
async fn refused(home: &Home, args: &[&str], code: i32, words: &[&str]) -> Outcome {
    let ran = home.warden(args, SOON).await?;
    let what = format!("{args:?}: {ran:?}");
    if ran.code != code {
        return Err(Trouble::new(format!("exit code {} instead of {code}: {what}", ran.code)));
    }
    for word in words {
        if !ran.stderr.contains(word) {
            return Err(Trouble::new(format!("{word:?} is not told: {what}")));
        }
    }
    for rude in ["panicked", "RUST_BACKTRACE", "stack backtrace", "internal error"] {
        if ran.all().contains(rude) {
            return Err(Trouble::new(format!("{rude:?}: {what}")));
        }
    }
    Ok(())
}

/// Checks a configuration with one fake model and these lines, with `config check` and with `serve`.
async fn wrong_config(top: &str, model: &str, words: &[&str]) -> Outcome {
    let setup = Setup::new()?.top(top).fake("m", &json!({}), model)?;
    let config = setup.home.file("warden.toml", setup.config())?;
    let config = config.to_str().unwrap_or_default();
    refused(&setup.home, &["config", "check", "--config", config], 2, words).await?;
    refused(&setup.home, &["serve", "--config", config], 2, words).await
}

#[tokio::test]
async fn an_unknown_key_names_the_file_the_line_and_the_nearest_key() -> Outcome {
    wrong_config("server.prot = 1", "", &["warden.toml:", "prot", "port"]).await?;
    wrong_config("", "preloaded = true", &["warden.toml:", "preloaded", "preload"]).await?;
    wrong_config("", "policy.host.sotf = \"1GiB\"", &["warden.toml:", "sotf", "soft"]).await
}

#[tokio::test]
async fn a_size_that_is_none_is_quoted_with_a_right_one() -> Outcome {
    wrong_config("", "policy.host.soft = \"12 GB of ram\"", &["warden.toml:", "12 GB of ram", "GiB"]).await
}

#[tokio::test]
async fn two_models_with_one_alias_are_both_named() -> Outcome {
    let setup = Setup::new()?.fake("one", &json!({}), "aliases = [\"x\"]\n")?;
    let setup = setup.fake("two", &json!({}), "aliases = [\"x\"]\n")?;
    let config = setup.home.file("warden.toml", setup.config())?;
    let config = config.to_str().unwrap_or_default();
    refused(&setup.home, &["serve", "--config", config], 2, &["`x`", "one", "two"]).await
}

#[tokio::test]
async fn a_model_file_that_does_not_exist_is_named() -> Outcome {
    let setup = Setup::new()?.model("m", "binary = \"/bin/true\"\nmodel = \"/no/such/model.gguf\"");
    let config = setup.home.file("warden.toml", setup.config())?;
    let config = config.to_str().unwrap_or_default();
    refused(&setup.home, &["serve", "--config", config], 2, &["/no/such/model.gguf"]).await
}

#[tokio::test]
async fn a_binary_that_is_not_llama_server_is_named() -> Outcome {
    for (binary, words) in [("/bin/true", "/bin/true"), ("/no/such/binary", "/no/such/binary")] {
        let setup = Setup::new()?;
        let model = setup.home.path().join("model.gguf");
        let setup = setup.model("m", &format!("binary = '{binary}'\nmodel = '{}'", model.display()));
        let config = setup.home.file("warden.toml", setup.config())?;
        let config = config.to_str().unwrap_or_default();
        refused(&setup.home, &["serve", "--config", config], 2, &[words]).await?;
    }
    Ok(())
}

#[tokio::test]
async fn an_archive_without_llama_cpp_in_it_is_named() -> Outcome {
    let home = Home::new()?;
    let empty = home.path().join("empty");
    std::fs::create_dir(&empty)?;
    let ran = home.run("tar".as_ref(), ["czf", "x.tar.gz", "empty"], SOON).await?;
    assert_eq!(ran.code, 0, "{ran:?}");
    refused(&home, &["build", "--source", "x.tar.gz"], 2, &["x.tar.gz", "llama.cpp"]).await?;
    refused(&home, &["build", "--source", "empty"], 2, &["empty", "llama.cpp"]).await?;
    home.file("no.tar.gz", "this is no archive")?;
    refused(&home, &["build", "--source", "no.tar.gz"], 2, &["no.tar.gz"]).await?;
    refused(&home, &["build", "--source", "/no/such/thing"], 2, &["/no/such/thing"]).await
}

#[tokio::test]
async fn a_port_in_use_is_named() -> Outcome {
    let taken = std::net::TcpListener::bind("127.0.0.1:0")?;
    let port = taken.local_addr()?.port().to_string();
    let setup =
        Setup::new()?.top(&format!("server.port = {port}")).fake("m", &json!({}), "preload = false")?;
    let config = setup.home.file("warden.toml", setup.config())?;
    refused(&setup.home, &["serve", "--config", config.to_str().unwrap_or_default()], 1, &[&port]).await
}

#[tokio::test]
async fn an_unwritable_state_directory_is_named() -> Outcome {
    // A file in the way also refuses root, for whom modes have no effect.
    let setup = Setup::new()?;
    let file = setup.home.file("in-the-way", "")?;
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o400))?;
    let top = format!("paths.state_dir = '{}/state'", file.display());
    let setup = setup.top(&top).fake("m", &json!({}), "preload = false")?;
    let config = setup.home.file("warden.toml", setup.config())?;
    let ran = setup.home.warden(["serve", "--config", config.to_str().unwrap_or_default()], SOON).await?;
    assert!(ran.code == 1 || ran.code == 2, "{ran:?}");
    assert!(ran.stderr.contains("in-the-way") && !ran.stderr.contains("panicked"), "{ran:?}");
    Ok(())
}

#[tokio::test]
async fn wrong_usage_is_code_2_with_the_nearest_command() -> Outcome {
    let home = Home::new()?;
    refused(&home, &["serv"], 2, &["serve"]).await?;
    refused(&home, &["serve", "--confg", "x"], 2, &["--config"]).await?;
    refused(&home, &["serve", "--config", "/no/such/file.toml"], 2, &["/no/such/file.toml"]).await?;
    home.file("broken.toml", "server = [")?;
    refused(&home, &["serve", "--config", "broken.toml"], 2, &["broken.toml"]).await
}

#[tokio::test]
async fn commands_without_a_running_instance_say_so() -> Outcome {
    let home = Home::new()?;
    for args in [&["status"][..], &["restart", "m"], &["drain", "m"], &["logs", "m"], &["events"]] {
        refused(&home, args, 1, &["error:"]).await?;
    }
    Ok(())
}

#[tokio::test]
async fn bodies_and_names_that_are_wrong_get_an_openai_error() -> Outcome {
    let warden =
        Setup::new()?.fake("m", &json!({}), "")?.fake("n", &json!({}), "preload = false")?.start().await?;
    let unknown = warden.http.post(CHAT, &chat("x", "nope", "hi", 2, false)).await?;
    assert_eq!(unknown.status.as_u16(), 404, "{}", unknown.text());
    let message = unknown.json()?["error"]["message"].as_str().unwrap_or_default().to_owned();
    assert!(message.contains("nope") && message.contains("`m`"), "{message}");
    let request = hyper::Request::post(CHAT).header("content-type", "application/json");
    let request =
        request.body(http_body_util::Full::new(bytes::Bytes::from("{\"model\": \"m\", nonsense")))?;
    let broken = warden.http.send(request).await?;
    assert!(broken.status.is_client_error() || broken.status.as_u16() == 500, "{}", broken.text());
    assert!(broken.json()?["error"]["message"].is_string(), "{}", broken.text());
    Ok(())
}

#[tokio::test]
async fn ten_megabytes_of_headers_are_refused_without_taking_the_memory() -> Outcome {
    let warden = Setup::new()?.fake("m", &json!({}), "")?.start().await?;
    warden.until_ready(1).await?;
    let mut raw = warden.http.raw().await?;
    raw.write(b"GET /health HTTP/1.1\r\nHost: x\r\n").await?;
    let line = format!("X-Filler: {}\r\n", "a".repeat(8000));
    for _ in 0..1300 {
        if raw.write(line.as_bytes()).await.is_err() {
            break;
        }
    }
    // The reset that unread bytes cause may lose the answer, but the connection must be closed.
    let all = raw.to_end(Duration::from_secs(20)).await?;
    assert!(all.is_empty() || all.contains("HTTP/1.1 431"), "{all}");
    let answer = warden.http.get("/health").await?;
    assert!(answer.status.is_success());
    Ok(())
}

#[tokio::test]
async fn ambiguous_framing_is_refused_before_it_reaches_a_backend() -> Outcome {
    let warden = Setup::new()?.fake("m", &json!({}), "")?.start().await?;
    warden.until_ready(1).await?;
    for head in [
        "POST /completion HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
        "POST /completion HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: xchunked\r\n\r\n",
        "POST /completion HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        "GET /health HTTP/1.1\r\nHost: x\r\nBad Name: y\r\n\r\n",
        "GARBAGE\r\n\r\n",
    ] {
        let mut raw = warden.http.raw().await?;
        raw.write(head.as_bytes()).await?;
        let all = raw.to_end(Duration::from_secs(15)).await?;
        assert!(
            all.is_empty() || all.starts_with("HTTP/1.1 4") || all.starts_with("HTTP/1.1 501"),
            "{head:?}: {all}"
        );
    }
    assert!(warden.ledger().lines()?.is_empty());
    Ok(())
}

#[tokio::test]
async fn a_length_beside_chunks_is_refused_or_ignored_and_the_connection_ends() -> Outcome {
    let warden = Setup::new()?.fake("m", &json!({}), "")?.start().await?;
    warden.until_ready(1).await?;
    let body = chat("both", "m", "hi", 2, false).to_string();
    let head = "Host: x\r\nContent-Length: 3\r\nTransfer-Encoding: chunked";
    let mut raw = warden.http.raw().await?;
    // A server that trusts the length would take the bytes after the last chunk for a second request.
    let smuggled = "GET /health HTTP/1.1\r\nHost: x\r\n\r\n";
    let all =
        format!("POST {CHAT} HTTP/1.1\r\n{head}\r\n\r\n{:x}\r\n{body}\r\n0\r\n\r\n{smuggled}", body.len());
    raw.write(all.as_bytes()).await?;
    let answer = raw.to_end(Duration::from_secs(15)).await?;
    assert_eq!(answer.matches("HTTP/1.1 ").count(), 1, "one answer, then the end (RFC 9112 6.1): {answer}");
    assert!(answer.starts_with("HTTP/1.1 400") || answer.starts_with("HTTP/1.1 200"), "{answer}");
    Ok(())
}
