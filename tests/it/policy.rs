//! Policies can be tried before use: recordings are replayed, a configuration is explained, leaks are
//! simulated. Wrong input gives one clear error.

use std::path::PathBuf;

use serde_json::{Value, json};
use warden_rig::warden::{SOON, Setup};
use warden_rig::{Home, Outcome, Trouble};

fn trace(name: &str) -> String {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../policies/tests/traces");
    folder.join(name).to_string_lossy().into_owned()
}

const IMAGES: &str = "b8827-long-gemma4-image-fixed.jsonl";
const NO_GRAPHS: &str = "b8827-gemma4-image-nographs.jsonl";
const PROMPTS: &str = "b8827-llama-text-promptcache.jsonl";
const MIXED: &str = "b8827-gemma4-mixed-np3.jsonl";

async fn said(home: &Home, args: &[&str]) -> Result<String, Trouble> {
    // A simulated month takes seconds of CPU, and a busy machine has few of them.
    let ran = home.warden(args, SOON * 4).await?;
    if ran.code != 0 {
        return Err(Trouble::new(format!("{args:?}: {ran:?}")));
    }
    Ok(ran.stdout)
}

async fn replayed(home: &Home, args: &[&str]) -> Result<Vec<Value>, Trouble> {
    let args: Vec<&str> = ["policy", "replay", "--json"].iter().chain(args).copied().collect();
    let text = said(home, &args).await?;
    text.lines()
        .map(|line| serde_json::from_str(line).map_err(|error| Trouble::new(format!("{error}: {line}"))))
        .collect()
}

#[tokio::test]
async fn a_replay_tells_a_leak_from_a_cache_and_from_nothing() -> Outcome {
    let home = Home::new()?;
    let all = [trace(IMAGES), trace(NO_GRAPHS), trace(MIXED)];
    let all: Vec<&str> = all.iter().map(String::as_str).collect();
    let [images, nothing, mixed] = replayed(&home, &all).await?.try_into().unwrap();
    assert_eq!(images["trace"], json!(all[0]));
    for (series, truth, within) in [("host", 4.42, 120), ("vram0", 0.95, 400)] {
        let one = &images["series"][series];
        assert_eq!(one["final"], "Leaking", "{series}: {one}");
        let slope = one["slope_mib_per_request"].as_f64().unwrap();
        assert!((slope - truth).abs() < truth * 0.1, "{series}: {slope}");
        let first = one["first_leaking_request"].as_u64().unwrap();
        assert!(first <= within, "{series}: {first}");
        assert_ne!(one["blame"], "hour", "{one}");
        let turns = one["verdicts"].as_array().unwrap();
        assert!(turns.iter().any(|turn| turn["verdict"] == "Leaking" && turn["request"] == first), "{one}");
    }
    for series in ["host", "vram0"] {
        let one = &nothing["series"][series];
        assert_eq!((&one["final"], &one["first_leaking_request"]), (&json!("Steady"), &Value::Null), "{one}");
        assert_ne!(mixed["series"][series]["blame"], "prompt_token", "{mixed}");
    }
    assert_eq!(nothing["actions"], json!([]));
    assert_eq!(images["actions"], json!([]), "without a policy nothing is decided");

    let prompts = trace(PROMPTS);
    let [undeclared] = replayed(&home, &[&prompts]).await?.try_into().unwrap();
    assert_eq!(undeclared["series"]["host"]["final"], "Leaking", "nothing is declared unless it is given");
    let [declared] = replayed(&home, &[&prompts, "--cache-ram", "2048"]).await?.try_into().unwrap();
    let host = &declared["series"]["host"];
    assert_eq!(host["final"], "Bounded", "{host}");
    assert!(host["fill"]["allowed_mib"].as_f64().unwrap() >= 2048.0, "{host}");
    assert!(host["fill"]["used_mib"].as_f64().unwrap() > 1000.0, "{host}");
    // Without a bound, the cache may take half of the machine, as for a running server.
    let unbounded = [prompts.as_str(), "--cache-ram", "-1", "--host-memory", "8GiB"];
    let [unbounded] = replayed(&home, &unbounded).await?.try_into().unwrap();
    let host = &unbounded["series"]["host"];
    assert_eq!(host["final"], "Bounded", "{host}");
    assert!(host["fill"]["allowed_mib"].as_f64().unwrap() >= 4096.0, "{host}");
    for (given, says) in [("-1", "--host-memory"), ("18446744073709551615", "MiB"), ("garbage", "MiB")] {
        let ran = home.warden(&["policy", "replay", &prompts, "--cache-ram", given], SOON).await?;
        assert!(ran.code == 2 && ran.stderr.contains(says), "{given}: {ran:?}");
    }
    Ok(())
}

#[tokio::test]
async fn a_replay_with_a_policy_says_what_would_be_done_and_when() -> Outcome {
    let home = Home::new()?;
    let images = trace(IMAGES);
    home.file("soft.toml", "host.soft = \"1GiB\"\nhost.hard = \"2GiB\"\n")?;
    let [done] = replayed(&home, &[&images, "--policy", "soft.toml"]).await?.try_into().unwrap();
    let acts = done["actions"].as_array().unwrap();
    let of = |reason: &str| {
        let found = acts.iter().find(|act| act["reason"] == reason);
        found.cloned().ok_or_else(|| Trouble::new(format!("no {reason} in {acts:?}")))
    };
    let (soft, hard) = (of("host_soft")?, of("host_hard")?);
    assert_eq!((&soft["action"], &soft["series"]), (&json!("recycle_when_quiet"), &json!("host")));
    assert_eq!(hard["action"], "drain_now");
    assert!(soft["request"].as_u64() < hard["request"].as_u64(), "{acts:?}");
    assert!(soft["charged_mib"].as_f64().unwrap() >= 1024.0, "{soft}");
    let kills: Vec<_> = acts.iter().filter(|act| act["action"] == "kill_now").collect();
    assert_eq!(kills.last().map(|act| &act["due"]), Some(&json!(true)), "held back at first: {kills:?}");
    let number = acts.len();
    assert!(number <= 6, "each decision is listed once: {acts:?}");

    // A share of an unknown amount is no budget, and the output says so.
    home.file("share.toml", "vram.soft = \"80%\"\n")?;
    let text = said(&home, &["policy", "replay", &images, "--policy", "share.toml"]).await?;
    assert!(text.contains("off: give --gpu-memory"), "{text}");

    // A slope alone is reported without an action, unless the policy demands one.
    let limits = [images.as_str(), "--host-memory", "16GiB"];
    let [observed] = replayed(&home, &limits).await?.try_into().unwrap();
    assert_eq!(observed["actions"], json!([]));
    assert_eq!(observed["observed"][0]["reason"], "growth", "{observed}");
    home.file("growth.toml", "[policy]\ngrowth = \"recycle\"\n")?;
    let args: Vec<&str> = limits.into_iter().chain(["--policy", "growth.toml"]).collect();
    let [recycled] = replayed(&home, &args).await?.try_into().unwrap();
    let act = &recycled["actions"][0];
    assert_eq!(act["reason"], "growth", "{recycled}");
    assert_eq!(act["request"], recycled["series"]["host"]["first_leaking_request"], "{recycled}");

    let first = format!("request {}", recycled["series"]["host"]["first_leaking_request"]);
    let text = said(&home, &["policy", "replay", &images, "--policy", "soft.toml"]).await?;
    for words in
        ["-> Leaking: +4.4", "MiB a request", "host memory passed the hard budget, 2.0 GiB", first.as_str()]
    {
        assert!(text.contains(words), "{words:?} is missing in\n{text}");
    }
    Ok(())
}

#[tokio::test]
async fn a_replay_for_a_model_uses_its_command_and_names_what_helps_unless_it_is_in_place() -> Outcome {
    let model = "args = [\"--cache-ram\", \"2048\"]\nbinary = \"/bin/true\"\nmodel = \"no.gguf\"\n";
    let setup = Setup::new()?.model("cached", model);
    let setup = setup.model("capped", &format!("{model}mitigations = [\"no-cuda-graphs\"]\n"));
    let home = &setup.home;
    home.file("warden.toml", setup.config())?;
    let prompts = trace(PROMPTS);
    let of = ["--config", "warden.toml", "--model", "cached"];
    let args: Vec<&str> = [prompts.as_str()].into_iter().chain(of).collect();
    let [done] = replayed(home, &args).await?.try_into().unwrap();
    assert_eq!(done["series"]["host"]["final"], "Bounded", "the model's own --cache-ram counts: {done}");
    assert_eq!(done["advice"], json!([]));

    let images = trace(IMAGES);
    for (name, graphs) in [("cached", true), ("capped", false)] {
        let args = [images.as_str(), "--config", "warden.toml", "--model", name, "--cache-ram", "0"];
        let [done] = replayed(home, &args).await?.try_into().unwrap();
        let advice = done["advice"].as_array().unwrap();
        let of_graphs = |one: &Value| one["leak"].as_str().is_some_and(|leak| leak.starts_with("cuda-graph"));
        assert_eq!(advice.iter().any(of_graphs), graphs, "{name}: {advice:?}");
        let tries = |one: &Value| one["mitigations"].to_string().contains("no-cuda-graphs");
        assert_eq!(advice.iter().any(tries), graphs, "{name}: {advice:?}");
    }
    Ok(())
}

#[tokio::test]
async fn a_recording_that_is_broken_names_the_line_and_nothing_is_printed_half() -> Outcome {
    let home = Home::new()?;
    home.file("good.jsonl", "{\"t\": 0, \"requests\": 1, \"rss_anon_kib\": 5}\n")?;
    for (text, words) in [
        ("{\"t\": 0, \"requests\": 1}\nnonsense\n", ["bad.jsonl:2", "JSON"]),
        ("{\"t\": 0, \"requests\": 1}\n{\"t\": 1}\n", ["bad.jsonl:2", "requests"]),
        ("{\"t\": \"noon\", \"requests\": 1}\n", ["bad.jsonl:1", "`t`"]),
        ("{\"t\": 9, \"requests\": 1}\n{\"t\": 1, \"requests\": 2}\n", ["bad.jsonl:2", "order"]),
        ("\n", ["bad.jsonl", "no reading"]),
    ] {
        home.file("bad.jsonl", text)?;
        for json in [&["--json"][..], &[]] {
            let args = ["policy", "replay", "good.jsonl", "bad.jsonl"];
            let args: Vec<&str> = args.iter().chain(json).copied().collect();
            let ran = home.warden(&args, SOON).await?;
            assert_eq!((ran.code, ran.stdout.as_str()), (2, ""), "{ran:?}");
            assert!(words.iter().all(|word| ran.stderr.contains(word)), "{words:?}: {ran:?}");
            assert!(ran.stderr.contains("hint: "), "{ran:?}");
        }
    }
    let ran = home.warden(["policy", "replay", "no-such.jsonl"], SOON).await?;
    assert!(ran.code == 2 && ran.stderr.contains("no-such.jsonl"), "{ran:?}");
    Ok(())
}

#[tokio::test]
async fn a_policy_file_that_is_wrong_names_the_line_and_the_nearest_key() -> Outcome {
    let home = Home::new()?;
    home.file("t.jsonl", "{\"t\": 0, \"requests\": 1}\n")?;
    for (text, words) in [
        ("growth = \"recycle\"\nhost.sotf = \"1GiB\"\n", ["p.toml:2", "`soft`"]),
        ("grwth = \"recycle\"\n", ["p.toml:1", "`growth`"]),
        ("growth = \"restart\"\n", ["p.toml:1", "`observe`"]),
        ("vram.soft = \"lots\"\n", ["p.toml:1", "`lots` is not a size"]),
        ("host = { soft = \"2GiB\", hard = \"1GiB\" }\n", ["p.toml:1", "below the soft one"]),
        ("only = \"2-5\"\n", ["p.toml:1", "02:00-05:00"]),
        ("= 1\n", ["p.toml:1", "not TOML"]),
    ] {
        home.file("p.toml", text)?;
        let ran = home.warden(["policy", "replay", "t.jsonl", "--policy", "p.toml"], SOON).await?;
        assert_eq!((ran.code, ran.stdout.as_str()), (2, ""), "{text}: {ran:?}");
        assert!(words.iter().all(|word| ran.stderr.contains(word)), "{words:?}: {ran:?}");
    }
    let ran = home.warden(["policy", "replay", "t.jsonl", "--model", "m"], SOON).await?;
    assert!(ran.code == 2 && ran.stderr.contains("--model m") && ran.stderr.contains("--config"), "{ran:?}");
    Ok(())
}

#[tokio::test]
async fn a_configurations_policies_are_explained_with_what_is_off_and_why() -> Outcome {
    let policy = "args = [\"--cache-ram\", \"512\"]\npolicy.host = { soft = \"2GiB\", hard = \"auto\" }\npolicy.vram.soft = \"90%\"\n\
                  policy.growth = \"recycle\"\npolicy.admission = \"enforce\"\npolicy.only = [\"02:00-05:00\"]\n";
    let setup = Setup::new()?.top("shared.host.soft = \"3GiB\"").fake("big", &json!({}), policy)?;
    let setup = setup.fake(
        "plain",
        &json!({}),
        "args = [\"--cache-ram\", \"8192\"]\npolicy.host.hard = \"4GiB\"\npolicy.max_age = \"24h\"\n",
    )?;
    let home = &setup.home;
    home.file("warden.toml", setup.config())?;
    let ran = home.warden(["policy", "check", "warden.toml"], SOON).await?;
    assert_eq!(ran.code, 0, "{ran:?}");
    let (big, rest) = ran.stdout.split_once("model plain").unwrap();
    let (plain, all) = rest.split_once("all models together").unwrap();
    for (text, words) in [
        (big, "host soft      2.0 GiB: replaced when quiet"),
        (big, "host hard      auto: 115 % of the soft budget"),
        (big, "prompt cache: 512.0 MiB (`--cache-ram 512`)"),
        (big, "VRAM soft      90%"),
        (big, "recycle: a leak that reaches a budget"),
        (big, "02:00-05:00"),
        (big, "at most one replacement every 10 min"),
        (big, "`Retry-After`"),
        (plain, "VRAM           off: neither"),
        (plain, "observe: leaks are reported"),
        (plain, "at an age of 1 d"),
        (plain, "admission      off"),
        (plain, "warning"),
        (plain, "--cache-ram"),
        (all, "3.0 GiB: the one whose replacement gives back most"),
    ] {
        assert!(text.contains(words), "{words:?} is missing in\n{text}");
    }
    assert!(!big.contains("warning"), "{big}");
    assert!(ran.stderr.contains("warning: ") && ran.stderr.contains("below the prompt cache"), "{ran:?}");
    let one = said(home, &["policy", "check", "warden.toml", "--model", "plain"]).await?;
    assert!(one.starts_with("model plain\n") && !one.contains("model big"), "{one}");
    let ran = home.warden(["policy", "check", "warden.toml", "--model", "pla"], SOON).await?;
    assert!(ran.code == 2 && ran.stderr.contains("big, plain"), "{ran:?}");
    Ok(())
}

#[tokio::test]
async fn a_made_up_leak_runs_out_of_memory_without_a_policy_and_not_with_one() -> Outcome {
    let home = Home::new()?;
    let args = ["policy", "simulate", "--leak", "8MiB", "--per", "image", "--seed", "3"];
    let json: Vec<&str> = args.into_iter().chain(["--json"]).collect();
    let first = said(&home, &json).await?;
    assert_eq!(first, said(&home, &json).await?, "the same seed gives the same result");
    let done: Value = serde_json::from_str(&first).map_err(|error| Trouble::new(error.to_string()))?;
    let number = |who: &str, what: &str| done[who][what].as_u64().unwrap_or(u64::MAX);
    assert!(number("no_policy", "out_of_memory") >= 1, "{done}");
    assert_eq!((number("policy", "out_of_memory"), number("policy", "failed")), (0, 0), "{done}");
    assert!(number("policy", "restarts") >= 1 && number("every", "restarts") >= 1, "{done}");
    assert_eq!(done["out_of_memory_avoided"].as_u64(), Some(number("no_policy", "out_of_memory")), "{done}");
    let table = said(&home, &args).await?;
    for words in [
        "this policy",
        "no policy",
        "restart every ",
        "out of memory",
        "minutes waited",
        "8.0 MiB of host memory for each image",
    ] {
        assert!(table.contains(words), "{words:?} is missing in\n{table}");
    }
    let calm = said(&home, &["policy", "simulate", "--leak", "0", "--hours", "24", "--json"]).await?;
    let calm: Value = serde_json::from_str(&calm).map_err(|error| Trouble::new(error.to_string()))?;
    assert_eq!((&calm["policy"]["restarts"], &calm["every"]), (&json!(0), &Value::Null), "{calm}");
    for (bad, words) in [
        (["--leak", "many"], "not a size"),
        (["--hours", "900000"], "change --hours"),
        (["--fresh", "9GiB"], "--fresh has to be below"),
        (["--asleep", "noon"], "no window of the day"),
        (["--images", "2"], "from 0 to 1"),
    ] {
        let args: Vec<&str> = ["policy", "simulate"].into_iter().chain(bad).collect();
        let ran = home.warden(&args, SOON).await?;
        assert!(ran.code == 2 && ran.stderr.contains(words) && ran.stdout.is_empty(), "{bad:?}: {ran:?}");
    }
    Ok(())
}
