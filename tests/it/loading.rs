//! More models than memory: all requests are answered, and only as many models are loaded as fit.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use serde_json::{Value, json};
use warden_rig::swarm::{all_whole, requests, swarm};
use warden_rig::warden::{CHAT, SOON, Setup, Warden, chat};
use warden_rig::{FakeGpu, FakeNvml, Outcome, binaries, wait_until};

/// Turns short enough for a test.
const QUICK: &str = "internal.loading.turn_least = \"100ms\"\ninternal.loading.noted = \"100ms\"\n\
                     sensors.interval = \"100ms\"\ninternal.sensors.gpu_age = \"1ms\"";

const NAMES: [&str; 5] = ["a", "b", "c", "d", "e"];

/// Requests for all models in turn, so that the requested model is rarely loaded.
fn mixed(count: usize) -> Vec<Value> {
    let each: Vec<Vec<Value>> = NAMES.iter().map(|name| requests(name, name, count, 3)).collect();
    (0..count).flat_map(|number| each.iter().map(move |of| of[number].clone())).collect()
}

async fn events(warden: &Warden, what: &str) -> Result<usize, warden_rig::Trouble> {
    Ok(warden.cli(&["events"]).await?.stdout.lines().filter(|line| line.contains(what)).count())
}

#[tokio::test]
async fn five_models_share_a_gpu_that_holds_two() -> Outcome {
    const MIB: u64 = 1 << 20;
    let mut setup = Setup::new()?.top(QUICK);
    setup.home.sample_model("model.gguf").await?;
    let nvml = FakeNvml::in_home(&mut setup.home)?;
    let gpu = |pids: &[u32]| FakeGpu::shared_by(pids, 2048 * MIB, 720 * MIB);
    nvml.say(&[gpu(&[])])?;
    for name in NAMES {
        setup = setup.fake(name, &json!({"load_ms": 50}), "preload = false\n")?;
    }
    let warden = setup.start().await?;
    let most = Arc::new(AtomicUsize::new(0));
    let watch = async {
        loop {
            let pids: Vec<u32> =
                warden.backends().iter().filter_map(|one| u32::try_from(one.pid).ok()).collect();
            most.fetch_max(pids.len(), Ordering::Relaxed);
            if nvml.say(&[gpu(&pids)]).is_err() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    let all = mixed(24);
    let answers = tokio::select! {
        answers = swarm(&warden.http, &all, 20) => answers,
        () = watch => panic!("the GPU cannot be told"),
    };
    assert_eq!(answers.len(), all.len());
    all_whole(&answers)?;
    assert_eq!(most.load(Ordering::Relaxed), 2, "no more than fit, and not fewer");
    assert!(events(&warden, "to free memory for").await? > 3);
    Ok(())
}

#[tokio::test]
async fn where_the_environment_shows_one_gpu_of_two_that_one_is_shared() -> Outcome {
    const MIB: u64 = 1 << 20;
    let mut setup = Setup::new()?.top(QUICK);
    setup.home.sample_model("model.gguf").await?;
    let nvml = FakeNvml::in_home(&mut setup.home)?;
    setup.home.env.insert("CUDA_VISIBLE_DEVICES".into(), "1".into());
    let gpu = |pids: &[u32]| FakeGpu::shared_by(pids, 1024 * MIB, 720 * MIB);
    nvml.say(&[gpu(&[]), gpu(&[])])?;
    for name in ["a", "b"] {
        setup = setup.fake(name, &json!({"load_ms": 50}), "preload = false\nargs = [\"-c\", \"32768\"]\n")?;
    }
    let warden = setup.start().await?;
    let mut most = 0;
    let watch = async {
        loop {
            let pids: Vec<u32> =
                warden.backends().iter().filter_map(|one| u32::try_from(one.pid).ok()).collect();
            most = most.max(pids.len());
            if nvml.say(&[gpu(&[]), gpu(&pids)]).is_err() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    let all: Vec<Value> = (0..6)
        .flat_map(|number| ["a", "b"].map(|name| chat(&format!("{name}-{number}"), name, "hi", 3, false)))
        .collect();
    let answers = tokio::select! {
        answers = swarm(&warden.http, &all, 1) => answers,
        () = watch => panic!("the GPUs cannot be told"),
    };
    all_whole(&answers)?;
    assert_eq!(most, 1, "the other GPU is empty, and not theirs");
    assert!(events(&warden, "to free memory for").await? > 3);
    Ok(())
}

#[tokio::test]
async fn no_more_are_loaded_than_may_be_and_those_of_a_group_never_meet() -> Outcome {
    let mut setup = Setup::new()?.top(QUICK).top("loading.max_loaded = 2");
    for name in NAMES {
        let group = if matches!(name, "a" | "b") { "groups = [\"g\"]\n" } else { "" };
        setup = setup.fake(name, &json!({"load_ms": 30}), &format!("preload = false\n{group}"))?;
    }
    let warden = setup.start().await?;
    let (mut most, mut met) = (0, false);
    let watch = async {
        loop {
            most = most.max(warden.backends().len());
            let serves = async |name| warden.state(name).await.is_ok_and(|state| state == "loaded");
            met |= serves("a").await && serves("b").await && serves("a").await;
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    let all = mixed(16);
    let answers = tokio::select! {
        answers = swarm(&warden.http, &all, 20) => answers,
        () = watch => unreachable!(),
    };
    all_whole(&answers)?;
    assert_eq!((most, met), (2, false));
    Ok(())
}

#[tokio::test]
async fn who_stays_together_is_loaded_and_left_in_peace_together() -> Outcome {
    let setup = Setup::new()?
        .top(QUICK)
        .top("loading.max_loaded = 2")
        .fake("chat", &json!({"load_ms": 30}), "preload = false\nwith = [\"embed\"]\n")?
        .fake("embed", &json!({"load_ms": 30}), "preload = false\nttl = \"1s\"\n")?
        .fake("other", &json!({"load_ms": 30}), "preload = false\n")?;
    let warden = setup.start().await?;
    let ask = async |model: &str| warden.http.post(CHAT, &chat("x", model, "hi", 2, false)).await?.answer();
    let until = async |state: &str| {
        wait_until(&format!("`embed` is {state}"), SOON, async || {
            warden.state("embed").await.is_ok_and(|known| known == state)
        })
        .await
    };
    assert!(ask("chat").await?.is_whole());
    until("loaded").await?;
    // This answer takes longer than the idle time of `embed`, which nothing requests.
    let began = tokio::time::Instant::now();
    wait_until("the time of `embed` is over twice", SOON, async || began.elapsed() > Duration::from_secs(2))
        .await?;
    assert_eq!(warden.state("embed").await?, "loaded");
    assert!(ask("other").await?.is_whole());
    assert_eq!(
        warden.state("chat").await?,
        "unloaded",
        "two may be loaded, and `embed` does not leave `chat` alone"
    );
    until("unloaded").await?;
    assert_eq!(events(&warden, "no request for").await?, 1);
    Ok(())
}

#[tokio::test]
async fn what_cannot_be_is_told_before_the_start_with_numbers() -> Outcome {
    let mut setup = Setup::new()?;
    setup.home.sample_model("model.gguf").await?;
    let nvml = FakeNvml::in_home(&mut setup.home)?;
    nvml.say(&[FakeGpu { total: 1 << 30, ..FakeGpu::default() }])?;
    let setup = setup
        .fake("large", &json!({}), "args = [\"-c\", \"900000\"]\n")?
        .fake("one", &json!({}), "pin = true\n")?
        .fake("two", &json!({}), "pin = true\nwith = [\"one\"]\n")?;
    let config = setup.home.file("warden.toml", setup.config())?;
    let ran = setup.home.warden(&["config", "check", &config.display().to_string()], SOON).await?;
    assert_eq!(ran.code, 0, "{ran:?}");
    let told = ran.all();
    for words in [
        "model `large` does not fit on this machine even alone: `large` needs ",
        "the pinned models do not fit together: `two` needs ",
        "model `two` and those that are to be loaded along with it (`with`: `one`) do not fit together: ",
    ] {
        assert!(told.contains(words), "{words}: {told}");
    }
    Ok(())
}

#[tokio::test]
async fn a_pinned_model_stays_whoever_asks_and_a_reload_takes_its_pin() -> Outcome {
    let setup = Setup::new()?
        .top(QUICK)
        .top("loading.max_loaded = 1")
        .fake("kept", &json!({}), "pin = true\n")?
        .fake("other", &json!({}), "preload = false\nqueue.wait = \"60s\"\n")?;
    let mut warden = setup.start().await?;
    let kept = warden.until_ready(1).await?;
    // A request that would wait for ever gets an error that names the model in the way.
    let refused = warden.http.post(CHAT, &chat("x", "other", "hi", 2, false)).await?;
    assert_eq!(refused.status, 503, "{refused:?}");
    assert!(
        refused.text().contains("`loading.max_loaded`), and as many are never unloaded (`pin`): `kept`"),
        "{refused:?}"
    );
    assert_eq!(refused.headers.get("retry-after"), None);
    assert_eq!(events(&warden, "waits for room").await?, 1);
    assert_eq!(warden.backends(), kept);
    let config = warden.setup.config().replace("pin = true", "pin = false");
    warden.reload(&config)?;
    wait_until("it is served, once the pin is gone", SOON, async || {
        let asked = warden.http.post(CHAT, &chat("x", "other", "hi", 2, false)).await;
        asked.is_ok_and(|whole| whole.answer().is_ok_and(|answer| answer.is_whole()))
    })
    .await?;
    assert_eq!(warden.backends().len(), 1);
    Ok(())
}

#[tokio::test]
async fn a_stream_is_kept_alive_while_its_model_loads() -> Outcome {
    let setup = Setup::new()?
        .top("internal.upstream.comment_interval = \"50ms\"")
        .fake("slow", &json!({"load_ms": 700}), "preload = false\n")?
        .fake("silent", &json!({"load_ms": 300}), "preload = false\nloading = \"off\"\n")?;
    let warden = setup.start().await?;
    for stream in [true, false] {
        let whole = warden.http.post(CHAT, &chat("x", "slow", "hi", 3, stream)).await?;
        assert_eq!(whole.status, 200, "{whole:?}");
        assert_eq!(whole.text().contains(": the model is being loaded"), stream, "{}", whole.text());
        assert!(whole.answer()?.is_whole(), "{whole:?}");
        assert_eq!(warden.cli(&["drain", "slow"]).await?.code, 0);
    }
    let whole = warden.http.post(CHAT, &chat("x", "silent", "hi", 3, true)).await?;
    assert!(whole.answer()?.is_whole() && !whole.text().contains(": the model"), "{whole:?}");
    Ok(())
}

#[tokio::test]
async fn who_cannot_be_served_in_time_is_told_when_to_come_back_and_is_expected_then() -> Outcome {
    let more = "preload = false\nqueue.depth = 5\nqueue.wait = \"60s\"\n";
    let setup = Setup::new()?.fake("slow", &json!({"load_ms": 2000}), more)?;
    let mut warden = setup.start().await?;
    let ask = async |warden: &Warden| warden.http.post(CHAT, &chat("x", "slow", "hi", 2, false)).await;
    assert!(ask(&warden).await?.answer()?.is_whole(), "nothing is known of its load");
    let config = warden.setup.config().replace("60s", "1s").replace("depth = 5", "depth = 6");
    warden.reload(&config)?;
    wait_until("the queue is shorter", SOON, async || {
        warden.status("slow").await.is_ok_and(|status| status["queue_depth"] == 6)
    })
    .await?;
    assert_eq!(warden.cli(&["drain", "slow"]).await?.code, 0);
    let refused = ask(&warden).await?;
    assert_eq!(refused.status, 503, "{refused:?}");
    let told: Value = serde_json::from_str(&refused.text())?;
    let left = told["error"]["details"]["loads_in_s"].as_u64();
    assert!(left.is_some_and(|left| (2..=10).contains(&left)), "{told}");
    assert_eq!(refused.headers["retry-after"].to_str()?, left.unwrap_or_default().to_string());
    wait_until("it is loaded for who was told to come back", SOON, async || {
        warden.state("slow").await.is_ok_and(|state| state == "loaded")
    })
    .await?;
    assert!(ask(&warden).await?.answer()?.is_whole());
    Ok(())
}

#[tokio::test]
async fn a_model_that_does_not_fit_is_served_with_its_fallback_arguments() -> Outcome {
    let mut setup = Setup::new()?.top(QUICK);
    setup.home.sample_model("model.gguf").await?;
    let nvml = FakeNvml::in_home(&mut setup.home)?;
    nvml.say(&[FakeGpu { total: 1 << 30, ..FakeGpu::default() }])?;
    let more = "preload = false\nargs = [\"-c\", \"900000\"]\nfallback = [\"-c\", \"512\"]\n";
    let setup = setup.fake("large", &json!({}), more)?;
    let warden = setup.start().await?;
    let answer = warden.http.post(CHAT, &chat("x", "large", "hi", 2, false)).await?;
    assert!(answer.answer()?.is_whole());
    let words = warden.backends()[0].command_line();
    assert!(words.windows(2).any(|pair| pair == ["-c", "512"]), "{words:?}");
    assert_eq!(events(&warden, "falls back: started with -c 512 added, because it needs ").await?, 1);
    Ok(())
}

#[tokio::test]
async fn names_without_a_process_are_asked_for_like_models() -> Outcome {
    let setup = Setup::new()?
        .fake("a", &json!({}), "preload = false\n")?
        .fake("b", &json!({}), "")?
        .top("[names.best]\nmodels = [\"a\", \"b\"]\n[names.\"b-exact\"]\nmodels = [\"b\"]\nrequest.set = { seed = 7 }\n");
    let mut warden = setup.start().await?;
    warden.until_ready(1).await?;
    for name in ["best", "b-exact"] {
        assert!(warden.http.post(CHAT, &chat("x", name, "hi", 2, false)).await?.answer()?.is_whole());
    }
    assert_eq!(warden.state("a").await?, "unloaded", "who is loaded answers");
    let list: Value = serde_json::from_str(&warden.http.get("/v1/models").await?.text())?;
    let listed: Vec<_> = list["data"].as_array().into_iter().flatten().map(|one| one["id"].clone()).collect();
    assert_eq!(listed, ["a", "b", "b-exact", "best"]);
    // An invalid set is reported at the start, and a reload with it changes nothing.
    let wrong = warden.setup.config().replace("[\"a\", \"b\"]", "[\"a\", \"c\"]");
    let file = warden.home().file("wrong.toml", &wrong)?;
    let ran = warden.home().warden(&["config", "check", &file.display().to_string()], SOON).await?;
    assert!(ran.code != 0 && ran.all().contains("`names.best.models`: there is no model `c`"), "{ran:?}");
    warden.reload(&wrong)?;
    warden.says("there is no model `c`").await?;
    assert!(warden.http.post(CHAT, &chat("x", "best", "hi", 2, false)).await?.answer()?.is_whole());
    Ok(())
}

#[tokio::test]
async fn a_folder_of_models_is_enough_and_models_come_and_go() -> Outcome {
    let setup = Setup::new()?;
    let home = &setup.home;
    std::fs::create_dir_all(home.path().join("models/sub"))?;
    for path in ["models/first.gguf", "models/sub/second.gguf"] {
        home.sample_model(path).await?;
    }
    home.file("models/no-model.gguf", "this is none")?;
    let folder = home.path().join("models").display().to_string();
    let binary = binaries::fake_llama()?.display().to_string();
    let words = [
        "serve",
        "--models-dir",
        &folder,
        "--binary",
        &binary,
        "--port",
        "0",
        "--set",
        "internal.child.models_look=50ms",
    ];
    let args: Vec<std::ffi::OsString> = words.iter().map(Into::into).collect();
    let warden = setup.start_with(&args).await?;
    let names = async || {
        let told = warden.http.get("/v1/models").await.ok()?.json().ok()?;
        let all = told["data"].as_array()?.iter().filter_map(|model| model["id"].as_str().map(str::to_owned));
        let mut all: Vec<String> = all.collect();
        all.sort();
        Some(all)
    };
    let until = async |wanted: &[&str]| {
        wait_until(&format!("the models are {wanted:?}"), SOON, async || {
            names().await.is_some_and(|names| names == wanted)
        })
        .await
    };
    until(&["first", "second"]).await?;
    let asked = warden.http.post(CHAT, &chat("one", "second", "hi", 2, false)).await?;
    assert!(asked.answer()?.is_whole());
    // A folder that cannot be read removes no model.
    let models = warden.home().path().join("models");
    let aside = warden.home().path().join("aside");
    std::fs::rename(&models, &aside)?;
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(names().await, Some(vec!["first".to_owned(), "second".to_owned()]));
    std::fs::rename(&aside, &models)?;
    // One model appears slowly, as a copy, and one disappears while in use.
    let whole = std::fs::read(warden.home().path().join("models/first.gguf"))?;
    let third = warden.home().path().join("models/third.gguf");
    std::fs::write(&third, &whole[..whole.len() / 2])?;
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert_eq!(names().await, Some(vec!["first".to_owned(), "second".to_owned()]), "half of it is no model");
    std::fs::write(&third, &whole)?;
    until(&["first", "second", "third"]).await?;
    std::fs::remove_file(warden.home().path().join("models/sub/second.gguf"))?;
    until(&["first", "third"]).await?;
    wait_until("its process is gone", SOON, async || warden.backends().is_empty()).await?;
    let asked = warden.http.post(CHAT, &chat("two", "third", "hi", 2, false)).await?;
    assert!(asked.answer()?.is_whole());
    Ok(())
}

#[tokio::test]
async fn a_client_loads_and_unloads_models_as_with_llama_servers_router() -> Outcome {
    let setup = Setup::new()?.top(QUICK).top("loading.max_loaded = 1").fake("a", &json!({}), "")?;
    let warden = setup.fake("b", &json!({}), "preload = false\n")?.start().await?;
    let first = warden.until_ready(1).await?;
    let call = async |path: &str, model: &str| -> Result<(u16, Value), warden_rig::Trouble> {
        let answer = warden.http.post(path, &json!({ "model": model })).await?;
        Ok((answer.status.as_u16(), answer.json()?))
    };
    // No model is loaded only to be unloaded, and no serving model is evicted for that.
    let (code, answer) = call("/models/unload", "b").await?;
    assert_eq!((code, &answer["error"]["message"]), (400, &json!("model is not running")));
    assert_eq!(call("/models/load", "a").await?.0, 400);
    assert_eq!(call("/models/load", "c").await?.0, 404);
    assert_eq!((warden.backends(), warden.state("b").await?.as_str()), (first.clone(), "unloaded"));
    assert_eq!(call("/models/load", "b").await?, (200, json!({ "success": true })));
    wait_until("it is loaded, and the other has made room", SOON, async || {
        let states = (warden.state("a").await, warden.state("b").await);
        matches!(states, (Ok(a), Ok(b)) if a == "unloaded" && b == "loaded")
    })
    .await?;
    assert!(warden.http.post(CHAT, &chat("x", "b", "hi", 2, false)).await?.answer()?.is_whole());
    assert_eq!(call("/models/unload", "b").await?.0, 200);
    wait_until("it is gone, and nothing comes in its place", SOON, async || {
        warden.backends().is_empty() && warden.state("b").await.is_ok_and(|state| state == "unloaded")
    })
    .await?;
    let events = warden.cli(&["events"]).await?.stdout;
    assert!(events.contains("unload") && events.contains("client, 127.0.0.1"), "{events}");
    Ok(())
}
