//! `plan` reports the memory that models need and which fit together, and loads nothing.

use serde_json::{Value, json};
use warden_rig::warden::{SOON, Setup};
use warden_rig::{FakeGpu, FakeNvml, Home, Outcome, Trouble, wait_until};

/// A home with two sample models and a configuration whose program is missing.
async fn home() -> Result<Home, Trouble> {
    let home = Home::new()?;
    let mut models = Vec::new();
    for (name, flags) in
        [("small", "\"-c\", \"2048\", \"-np\", \"1\""), ("long", "\"-c\", \"65536\", \"-np\", \"2\"")]
    {
        let file = format!("{name}.gguf");
        home.sample_model(&file).await?;
        let path = home.path().join(file);
        models.push(format!(
            "[models.{name}]\nbinary = '/bin/true'\nmodel = '{}'\nargs = [{flags}]\n",
            path.display()
        ));
    }
    home.file("warden.toml", models.concat())?;
    Ok(home)
}

async fn plan(home: &Home, more: &[&str]) -> Result<String, Trouble> {
    let ran = home.warden(&[&["plan", "--config", "warden.toml"], more].concat(), SOON).await?;
    assert_eq!(ran.code, 0, "{ran:?}");
    Ok(ran.stdout)
}

#[tokio::test]
async fn each_model_has_its_parts_and_those_that_do_not_fit_together_are_told() -> Outcome {
    let home = home().await?;
    let told: Value = serde_json::from_str(&plan(&home, &["--json", "--gpus", "none"]).await?)?;
    assert_eq!(
        (&told["fit"]["all"], &told["models"][1]["context"]),
        (&Value::Bool(true), &Value::from(65_536)),
        "{told}"
    );
    let cache = |model: usize| told["models"][model]["host"]["cache"].as_u64().unwrap_or(0);
    assert_eq!(cache(1), 32 * cache(0), "so much longer");

    let told: Value = serde_json::from_str(&plan(&home, &["--json", "--gpus", "2GiB"]).await?)?;
    let needed = |model: usize| told["models"][model]["gpu_bytes"].as_u64().unwrap_or(0);
    assert!(needed(0) > 0 && needed(1) > needed(0), "{told}");
    // Room for the larger model alone.
    let gpu = format!("{}B", (needed(1) + needed(0) / 2) * 64 / 63);
    let told = plan(&home, &["--gpus", &gpu]).await?;
    for words in
        ["not all of them fit together", "  together: long on GPU 0\n", "  together: small on GPU 0\n"]
    {
        assert!(told.contains(words), "{words}: {told}");
    }
    let told = plan(&home, &["--gpus", &format!("{gpu},{gpu}")]).await?;
    assert!(told.contains("all 2 fit together: long on GPU") && told.contains("small on GPU"), "{told}");
    // A model that is too large for the machine, and a setting that would fit.
    let gpu = format!("{}B", (needed(0) + 1) * 64 / 63 + 2);
    let told = plan(&home, &["--gpus", &gpu]).await?;
    assert!(told.contains("long does not fit even alone") && told.contains("with `-c "), "{told}");
    let told = plan(&home, &["--host", "10MiB"]).await?;
    assert!(
        told.contains("small does not fit even alone") && told.contains("of the host are needed"),
        "{told}"
    );
    Ok(())
}

#[tokio::test]
async fn what_is_no_model_is_told_and_the_others_are_planned_all_the_same() -> Outcome {
    let home = home().await?;
    let whole = std::fs::read(home.path().join("small.gguf"))?;
    home.file("long.gguf", &whole[..whole.len() / 4])?;
    let told = plan(&home, &[]).await?;
    assert!(told.contains("long: not known: ") && told.contains("long.gguf"), "{told}");
    assert!(told.contains("it fits: small"), "{told}");
    home.file("long.gguf", "<html>not found</html>")?;
    assert!(plan(&home, &[]).await?.contains("is no GGUF file: it does not begin like one"));
    std::fs::remove_file(home.path().join("long.gguf"))?;
    let ran = home.warden(&["plan", "--config", "warden.toml"], SOON).await?;
    assert!(ran.code == 2 && ran.stderr.contains("there is no file"), "{ran:?}");
    home.file("long.gguf", &whole)?;
    for (flags, words) in
        [(&["--gpus", "lots"][..], "--gpus"), (&["--model", "none"], "there is no such model")]
    {
        let ran = home.warden(&[&["plan", "--config", "warden.toml"], flags].concat(), SOON).await?;
        assert!(ran.code == 2 && ran.stderr.contains(words), "{ran:?}");
    }
    Ok(())
}

#[tokio::test]
async fn each_replica_needs_a_place_of_its_own() -> Outcome {
    let home = home().await?;
    let text = std::fs::read_to_string(home.path().join("warden.toml"))?;
    home.file("warden.toml", text.replace("[models.small]\n", "[models.small]\nreplicas = 2\n"))?;
    let told: Value =
        serde_json::from_str(&plan(&home, &["--json", "--model", "small", "--gpus", "2GiB"]).await?)?;
    let needed = told["models"][0]["gpu_bytes"].as_u64().unwrap_or(0);
    let gpu = |share: u64| format!("{}B", needed * share / 10 * 64 / 63 + 2);
    let one = ["--model", "small", "--gpus"];
    let told = plan(&home, &[&one[..], &[&gpu(25)]].concat()).await?;
    assert!(told.contains("all 2 fit together: small on GPU 0, small (2) on GPU 0"), "{told}");
    let told = plan(&home, &[&one[..], &[&gpu(15)]].concat()).await?;
    assert!(told.contains("not all of them fit together"), "{told}");
    let two = format!("{},{}", gpu(15), gpu(15));
    let told = plan(&home, &[&one[..], &[&two]].concat()).await?;
    assert!(told.contains("small on GPU") && told.contains("2 processes, of which each"), "{told}");
    Ok(())
}

#[tokio::test]
async fn what_fills_up_later_is_told_beside_what_must_fit() -> Outcome {
    const GIB: u64 = 1 << 30;
    let home = home().await?;
    let text = std::fs::read_to_string(home.path().join("warden.toml"))?;
    let one = ["--model", "small", "--gpus", "none", "--host", "64GiB"];
    let mut needs = Vec::new();
    for (flags, bound, words) in [
        ("", json!(8 * GIB), "a prompt cache of up to 8.0 GiB"),
        (", \"--cache-ram\", \"512\"", json!(GIB / 2), "a prompt cache of up to 512.0 MiB"),
        (", \"--cache-ram\", \"-1\"", Value::Null, "a prompt cache without a bound may fill the host"),
        (", \"--cache-ram\", \"0\"", json!(0), ""),
    ] {
        home.file("warden.toml", text.replace("\"2048\"", &format!("\"2048\"{flags}")))?;
        let told: Value = serde_json::from_str(&plan(&home, &[&one[..], &["--json"]].concat()).await?)?;
        let model = &told["models"][0];
        assert_eq!(model["may_hold"]["prompt_cache_bytes"], bound, "{told}");
        let most = model["may_hold"]["host_bytes"].as_u64();
        let host = model["host_bytes"].as_u64().unwrap_or(0);
        assert_eq!(most, bound.as_u64().map(|bound| host + bound), "{told}");
        needs.push(host);
        let told = plan(&home, &one).await?;
        assert!(told.contains(words) && told.contains("it fits"), "{flags}: {told}");
        assert_eq!(told.contains("may come to hold"), !words.is_empty(), "{told}");
    }
    assert!(needs.iter().all(|host| *host == needs[0]), "no need of the load: {needs:?}");
    let little = ["--model", "small", "--gpus", "none", "--host", "4GiB"];
    home.file("warden.toml", &text)?;
    let told = plan(&home, &little).await?;
    assert!(told.contains("it fits: small") && told.contains("a prompt cache of up to 512.0 MiB"), "{told}");
    assert!(!told.contains("with full prompt caches"), "the machine bounds them: {told}");
    home.file("warden.toml", text.replace("\"2048\"", "\"2048\", \"--cache-ram\", \"8192\""))?;
    let told = plan(&home, &little).await?;
    assert!(told.contains("it fits: small") && told.contains("with full prompt caches"), "{told}");
    Ok(())
}

#[tokio::test]
async fn what_was_measured_takes_the_place_of_what_was_planned() -> Outcome {
    const TAKEN: u64 = 96;
    let setup = Setup::new()?.top("sensors.interval = \"20ms\"");
    setup.home.sample_model("model.gguf").await?;
    let warden = setup.fake("m", &json!({ "base_mib": TAKEN }), "").map(Setup::start)?.await?;
    warden.until_ready(1).await?;
    let kept = warden.home().path().join("state/llama-warden/growth.json");
    wait_until("what it holds is kept", SOON, async || {
        std::fs::read_to_string(&kept).is_ok_and(|text| text.contains("\"ready\""))
    })
    .await?;
    let told: Value = serde_json::from_str(&plan(warden.home(), &["--json"]).await?)?;
    let model = &told["models"][0];
    let of = |name: &str| model[name].as_u64().unwrap_or(0);
    let mib = of("measured_host_bytes") >> 20;
    assert!((TAKEN..TAKEN + 32).contains(&mib), "{told}");
    assert_eq!(of("host_bytes"), of("measured_host_bytes"), "{told}");
    assert_ne!(of("planned_host_bytes"), of("host_bytes"), "{told}");
    let told = plan(warden.home(), &[]).await?;
    assert!(told.contains(" MiB (measured)") && told.contains("measured: "), "{told}");
    // Measurements of this machine do not count for another one.
    let told: Value = serde_json::from_str(&plan(warden.home(), &["--json", "--gpus", "2GiB"]).await?)?;
    assert!(told["models"][0]["measured_host_bytes"].is_null(), "{told}");
    Ok(())
}

#[tokio::test]
async fn vram_that_was_measured_counts_and_what_was_estimated_does_not() -> Outcome {
    const GIB: u64 = 1 << 30;
    let mut setup = Setup::new()?.top("sensors.interval = \"20ms\"\ninternal.sensors.gpu_age = \"1ms\"");
    setup.home.sample_model("model.gguf").await?;
    let nvml = FakeNvml::in_home(&mut setup.home)?;
    let used = |processes: Vec<(u32, u64)>, used: u64| FakeGpu {
        total: 80 * GIB,
        used,
        processes,
        xids: Vec::new(),
    };
    nvml.say(&[used(Vec::new(), 0)])?;
    let warden = setup.fake("m", &json!({}), "")?.start().await?;
    let backend = warden.until_ready(1).await?[0];
    let pid = u32::try_from(backend.pid)?;
    let kept = warden.home().path().join("state/llama-warden/growth.json");
    let source = async |wanted: &str| {
        wait_until(&format!("VRAM is known by {wanted}"), SOON, async || {
            let status = warden.status("m").await.unwrap_or_default();
            status["backends"][0]["memory"]["vram"][0]["source"] == wanted
        })
        .await
    };
    nvml.say(&[used(vec![(pid, 0)], 9 * GIB)])?;
    source("estimate").await?;
    nvml.say(&[used(vec![(pid, 3 * GIB)], 9 * GIB)])?;
    source("process").await?;
    // The measurement is written at the end of the process at the latest.
    assert_eq!(warden.cli(&["drain", "m"]).await?.code, 0);
    wait_until("what it held is kept", SOON, async || {
        std::fs::read_to_string(&kept).is_ok_and(|text| text.contains("\"vram0\""))
    })
    .await?;
    let told: Value = serde_json::from_str(&plan(warden.home(), &["--json"]).await?)?;
    let model = &told["models"][0];
    assert_eq!(model["measured_gpu_bytes"], json!(3 * GIB), "{told}");
    assert_eq!(model["gpu_bytes"], json!(3 * GIB), "{told}");
    Ok(())
}
