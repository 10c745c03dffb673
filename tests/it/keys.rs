//! API keys: access, models and limits; neither keys nor prompts appear where they must not.

use std::fmt::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use bytes::Bytes;
use http_body_util::Full;
use hyper::Request;
use hyper::header::{AUTHORIZATION, HeaderValue};
use serde_json::{Value, json};
use warden_rig::http::{Flow, Whole, json_request};
use warden_rig::warden::{CHAT, SOON, Setup, chat};
use warden_rig::{Context as _, Outcome, Trouble, Warden, wait_until};

const ALICE: &str = "sk-alice-0123456789abcdef";
const BOB: &str = "sk-bob-0123456789abcdef";

fn write_keys(home: &Path, text: &str) -> Result<(), Trouble> {
    let path = home.join("keys.toml");
    std::fs::write(&path, text)?;
    Ok(std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600))?)
}

async fn start(keys: &str, top: &str) -> Result<Warden, Trouble> {
    let setup = Setup::new()?;
    write_keys(setup.home.path(), keys)?;
    let setup = setup.top("server.keys = \"keys.toml\"").top(top);
    let setup = setup.fake("a", &json!({}), "aliases = [\"nick\"]\n")?.fake("b", &json!({}), "")?;
    let warden = setup.start().await?;
    warden.until_ready(2).await?;
    Ok(warden)
}

fn with(key: &str, mut request: Request<Full<Bytes>>) -> Result<Request<Full<Bytes>>, Trouble> {
    let value = HeaderValue::from_str(&format!("Bearer {key}"))?;
    request.headers_mut().insert(AUTHORIZATION, value);
    Ok(request)
}

async fn post(warden: &Warden, key: &str, target: &str, body: &Value) -> Result<Whole, Trouble> {
    warden.http.send(with(key, json_request(target, body)?)?).await
}

async fn get(warden: &Warden, key: &str, target: &str) -> Result<Whole, Trouble> {
    warden.http.send(with(key, Request::get(target).body(Full::default())?)?).await
}

async fn stream(warden: &Warden, key: &str, body: &Value) -> Result<Flow, Trouble> {
    warden.http.open(with(key, json_request(CHAT, body)?)?).await
}

fn both() -> String {
    format!("[alice]\nkey = \"{ALICE}\"\n\n[bob]\nkey = \"{BOB}\"\nmodels = [\"nick\", \"z*\"]\n")
}

#[tokio::test]
async fn each_key_uses_its_models_and_nobody_else_gets_in() -> Outcome {
    let warden = start(&both(), "").await?;
    let hi = |model: &str| chat("x", model, "hi", 3, false);
    assert!(post(&warden, ALICE, CHAT, &hi("b")).await?.status.is_success());
    assert!(post(&warden, BOB, CHAT, &hi("a")).await?.status.is_success(), "by the alias's pattern");
    let hidden = post(&warden, BOB, CHAT, &hi("b")).await?;
    assert_eq!(hidden.status, 404);
    assert!(
        !hidden.text().contains("`b`,") && hidden.text().contains("the models are `a`"),
        "{}",
        hidden.text()
    );
    let listed = get(&warden, BOB, "/v1/models").await?.json()?;
    assert_eq!(listed["data"].as_array().map(Vec::len), Some(1), "{listed}");
    assert_eq!(listed["data"][0]["id"], "a");
    assert_eq!(get(&warden, ALICE, "/v1/models").await?.json()?["data"].as_array().map(Vec::len), Some(2));

    let wrong = post(&warden, "sk-alice-0123456789abcdeX", CHAT, &hi("a")).await?;
    assert_eq!((wrong.status.as_u16(), wrong.header("www-authenticate").is_empty()), (401, false));
    assert_eq!(wrong.json()?["error"]["message"], "Invalid API Key");
    let nobody = warden.http.post("/v1/messages", &hi("a")).await?;
    assert_eq!(
        (nobody.status.as_u16(), &nobody.json()?["error"]["type"]),
        (401, &json!("authentication_error"))
    );
    assert_eq!(warden.http.get("/v1/models").await?.status, 401);
    assert!(warden.http.get("/health").await?.status.is_success());
    // The process requires no key and gets none: the list of its headers has none of llama-warden's.
    let props = get(&warden, ALICE, "/props?model=a").await?;
    assert!(props.status.is_success(), "{}", props.text());
    Ok(())
}

#[tokio::test]
async fn limits_hold_and_a_client_that_leaves_gives_its_place_back() -> Outcome {
    let keys =
        format!("[alice]\nkey = \"{ALICE}\"\nconcurrency = 1\n[bob]\nkey = \"{BOB}\"\nrate = \"2/h\"\n");
    let warden = start(&keys, "").await?;
    warden.script("a", &json!({"ms_per_token": 50})).await?;
    let mut long = stream(&warden, ALICE, &chat("long", "a", "hi", 4000, true)).await?;
    assert!(long.event().await?.is_some());
    let busy = post(&warden, ALICE, CHAT, &chat("second", "b", "hi", 2, false)).await?;
    assert_eq!((busy.status.as_u16(), busy.header("retry-after")), (429, "1"), "{}", busy.text());
    assert_eq!(busy.header("x-warden-executed"), "no");
    drop(long);
    wait_until("the place is free", SOON, async || {
        let answer = post(&warden, ALICE, CHAT, &chat("third", "b", "hi", 2, false)).await;
        answer.is_ok_and(|answer| answer.status.is_success())
    })
    .await?;
    for status in [200, 200, 429] {
        let answer = post(&warden, BOB, CHAT, &chat("r", "b", "hi", 2, false)).await?;
        assert_eq!(answer.status.as_u16(), status, "{}", answer.text());
        if status == 429 {
            let after: u64 = answer.header("retry-after").parse()?;
            assert!((1700..=1800).contains(&after), "one in half an hour: {after}");
        }
    }
    let lines = [
        "llama_warden_key_requests_total{key=\"bob\"} 2",
        "llama_warden_key_rejected_total{key=\"bob\",reason=\"rate\"} 1",
        "llama_warden_key_tokens_total{key=\"bob\",kind=\"output\"} 4",
        "llama_warden_key_in_flight{key=\"alice\"} 0",
    ];
    warden.until_metrics(&lines).await?;
    Ok(())
}

#[tokio::test]
async fn keys_come_and_go_with_a_reload_and_what_was_used_stays_used() -> Outcome {
    let rated = |name: &str, key: &str| format!("[{name}]\nkey = \"{key}\"\nrate = \"1/h\"\n");
    let mut warden = start(&rated("alice", ALICE), "").await?;
    let hi = chat("x", "a", "hi", 2, false);
    assert!(post(&warden, ALICE, CHAT, &hi).await?.status.is_success());
    let config = warden.setup.config();
    // An invalid file changes nothing.
    write_keys(warden.home().path(), &format!("[alice]\nkey = \"{ALICE}\"\nrat = 1\n"))?;
    warden.reload(&config)?;
    warden.says("unknown key `rat`").await?;
    assert_eq!(post(&warden, ALICE, CHAT, &hi).await?.status, 429, "known, and used up");
    let new = "sk-alice-second-key-0123456789";
    write_keys(warden.home().path(), &format!("{}{}", rated("alice", new), rated("bob", BOB)))?;
    warden.reload(&config)?;
    wait_until("bob is known", SOON, async || {
        post(&warden, BOB, CHAT, &hi).await.is_ok_and(|answer| answer.status.is_success())
    })
    .await?;
    assert_eq!(post(&warden, ALICE, CHAT, &hi).await?.status, 401, "the old key is gone");
    assert_eq!(post(&warden, new, CHAT, &hi).await?.status, 429, "the name is known, and what it used");
    Ok(())
}

#[tokio::test]
async fn neither_keys_nor_prompts_are_in_logs_environments_arguments_or_the_configuration_shown() -> Outcome {
    let top = "log.level = \"info,warden_gateway=trace,warden_supervisor=trace,warden_config=trace,\
               warden_admin=trace,warden_page=trace,llama_warden=trace,access=trace\"\n\
               log.access = \"access.log\"";
    let mut warden = start(&both(), top).await?;
    let words = "xylophone marmalade";
    let mut prompt = chat("x", "a", words, 3, true);
    prompt["stop"] = json!(["quixotic"]);
    assert!(post(&warden, ALICE, CHAT, &prompt).await?.status.is_success());
    prompt["model"] = json!("b");
    assert_eq!(post(&warden, BOB, CHAT, &prompt).await?.status, 404);
    let broken = format!("{{\"model\":\"a\",\"messages\":\"{words}");
    let request = Request::post(CHAT).body(Full::new(Bytes::from(broken)))?;
    let _refused = warden.http.send(with(ALICE, request)?).await?;
    let wrong = "sk-wrong-0123456789abcdef";
    assert_eq!(post(&warden, wrong, CHAT, &prompt).await?.status, 401);
    let shown = warden.cli(&["config", "show", "--config", "warden.toml"]).await?;
    assert!(shown.stdout.contains("keys = \"keys.toml\""), "{shown:?}");
    for process in warden.backends() {
        let environment = std::fs::read(format!("/proc/{}/environ", process.pid))?;
        let all = format!("{:?} {}", process.command_line(), String::from_utf8_lossy(&environment));
        assert!(![ALICE, BOB].iter().any(|key| all.contains(key)), "{all}");
    }
    warden.terminate(SOON).await?;
    let access = std::fs::read_to_string(warden.home().path().join("access.log"))?;
    let mut everything = format!("{access}{}{}", shown.all(), warden.kid.output());
    write!(everything, "{}", std::fs::read_to_string(warden.home().path().join("warden.log"))?)?;
    for word in [ALICE, BOB, wrong, "xylophone", "marmalade", "quixotic", "0123456789abcdef"] {
        assert!(!everything.contains(word), "`{word}` is shown in\n{everything}");
    }
    let line = access.lines().find(|line| line.contains("outcome=ok") && line.contains("route=chat"));
    let line = line.context(format!("no line for the chat in {access}"))?;
    for field in ["key=\"alice\"", "model=\"a\"", "protocol=http/1.1", "output_tokens=3", "stream=true"] {
        assert!(line.contains(field), "{field} is missing in {line}");
    }
    assert!(access.contains("outcome=key_model") && access.contains("outcome=wrong_key"), "{access}");
    Ok(())
}

#[tokio::test]
async fn the_file_of_the_access_log_may_be_renamed() -> Outcome {
    let mut warden = start(&both(), "log.access = \"access.log\"\nlog.format = \"json\"").await?;
    let home = warden.home().path().to_owned();
    let hi = chat("x", "a", "hi", 2, false);
    let lines = |name: &str| {
        let text = std::fs::read_to_string(home.join(name)).unwrap_or_default();
        text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok()).collect::<Vec<_>>()
    };
    assert!(post(&warden, ALICE, CHAT, &hi).await?.status.is_success());
    wait_until("the first line is there", SOON, async || lines("access.log").len() == 1).await?;
    std::fs::rename(home.join("access.log"), home.join("access.log.1"))?;
    let config = warden.setup.config();
    warden.reload(&config)?;
    wait_until("the file is there again", SOON, async || home.join("access.log").exists()).await?;
    assert!(post(&warden, ALICE, CHAT, &hi).await?.status.is_success());
    wait_until("the second line is there", SOON, async || lines("access.log").len() == 1).await?;
    assert_eq!((lines("access.log.1").len(), &lines("access.log")[0]["key"]), (1, &json!("alice")));
    Ok(())
}

#[tokio::test]
async fn a_new_key_goes_into_the_file_as_its_hash_and_opens_the_door() -> Outcome {
    let mut warden = start(&both(), "").await?;
    let new = warden.cli(&["keys", "new", "carol", "--file", "keys.toml"]).await?;
    assert_eq!(new.code, 0, "{new:?}");
    let key = new.stdout.trim().to_owned();
    let file = std::fs::read_to_string(warden.home().path().join("keys.toml"))?;
    assert!(file.contains("[carol]\nsha256 = ") && !file.contains(&key), "{file}");
    let checked = warden.cli(&["keys", "check", "keys.toml"]).await?;
    assert!(checked.stdout.contains("carol") && checked.stdout.contains("nick, z*"), "{checked:?}");
    assert!(![ALICE, BOB, &key].iter().any(|key| checked.all().contains(*key)), "{checked:?}");
    let config = warden.setup.config();
    warden.reload(&config)?;
    wait_until("carol gets in", SOON, async || {
        get(&warden, &key, "/v1/models").await.is_ok_and(|answer| answer.status.is_success())
    })
    .await
}

#[tokio::test]
async fn web_pages_call_as_configured() -> Outcome {
    let mut warden = start(&both(), "server.cors = [\"https://app.example\"]").await?;
    let asked = |origin: &str| {
        Request::options(CHAT)
            .header("origin", origin)
            .header("access-control-request-method", "POST")
            .header("access-control-request-headers", "authorization")
            .body(Full::default())
    };
    let answer = warden.http.send(asked("https://app.example")?).await?;
    assert_eq!(answer.header("access-control-allow-origin"), "https://app.example");
    assert_eq!(answer.header("access-control-allow-headers"), "authorization");
    assert_eq!(answer.header("access-control-max-age"), "600");
    let answer = warden.http.send(asked("https://evil.example")?).await?;
    assert_eq!(answer.header("access-control-allow-origin"), "");
    // llama-warden replaces the CORS headers of the process, which allows every origin.
    let page = |origin: &str| -> Result<Request<Full<Bytes>>, Trouble> {
        let mut request = json_request(CHAT, &chat("x", "a", "hi", 2, false))?;
        request.headers_mut().insert("origin", HeaderValue::from_str(origin)?);
        with(ALICE, request)
    };
    let seen =
        Request::get("/props?model=a").header("origin", "https://evil.example").body(Full::default())?;
    let answer = warden.http.send(with(ALICE, seen)?).await?;
    assert_eq!((answer.status.as_u16(), answer.header("access-control-allow-origin")), (200, ""));
    // A simple request, which a browser sends without a preflight, is refused.
    let answer = warden.http.send(page("https://evil.example")?).await?;
    assert_eq!((answer.status.as_u16(), answer.header("access-control-allow-origin")), (403, ""));
    let answer = warden.http.send(page("https://app.example")?).await?;
    assert_eq!(answer.header("access-control-allow-origin"), "https://app.example");
    assert!(answer.header("access-control-expose-headers").contains("x-request-id"));
    let off = warden.setup.config().replace("[\"https://app.example\"]", "\"off\"");
    warden.reload(&off)?;
    wait_until("pages are told nothing", SOON, async || {
        let request = asked("https://app.example").map_err(Trouble::from);
        match request {
            Ok(request) => warden
                .http
                .send(request)
                .await
                .is_ok_and(|answer| answer.header("access-control-allow-origin").is_empty()),
            Err(_) => false,
        }
    })
    .await
}
