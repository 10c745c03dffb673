//! Where settings come from and what is said about them: variables, secrets, contradictions, flags that do not exist.

use std::os::unix::fs::PermissionsExt as _;

use serde_json::json;
use warden_rig::warden::{SOON, Setup};
use warden_rig::{Home, Outcome};

const TOKEN: &str = "hf_abcdefghijklmnopqrstuvwxyzABCD1234";

#[tokio::test]
async fn a_variable_reaches_the_process_under_the_name_that_somebody_wrote_and_a_model_whatever_its_capitals()
-> Outcome {
    let mut setup = Setup::new()?.fake("Qwen3", &json!({}), "preload = true\n")?;
    for (name, value) in
        [("DEFAULTS__ENV__GGML_CUDA_DISABLE_GRAPHS", "1"), ("MODELS__QWEN3__QUEUE__DEPTH", "12")]
    {
        setup.home.env.insert(format!("LLAMA_WARDEN_{name}").into(), value.into());
    }
    let warden = setup.start().await?;
    let process = warden.until_ready(1).await?[0];
    let environment = std::fs::read(format!("/proc/{}/environ", process.pid))?;
    let environment = String::from_utf8_lossy(&environment);
    assert!(environment.split('\0').any(|one| one == "GGML_CUDA_DISABLE_GRAPHS=1"), "{environment}");
    assert_eq!(warden.status("Qwen3").await?["queue_depth"], 12);
    assert!(warden.status("qwen3").await.is_err(), "no model is made up");
    Ok(())
}

#[tokio::test]
async fn a_variable_of_a_model_that_does_not_exist_is_an_error_with_the_nearest_one() -> Outcome {
    let mut setup = Setup::new()?.fake("Qwen3", &json!({}), "")?;
    setup.home.env.insert("LLAMA_WARDEN_MODELS__QWEN__REPLICAS".into(), "2".into());
    setup.home.file("warden.toml", setup.config())?;
    let ran = setup.home.warden(["config", "check", "warden.toml"], SOON).await?;
    assert_eq!(ran.code, 2, "{ran:?}");
    for part in ["LLAMA_WARDEN_MODELS__QWEN__REPLICAS", "no model `QWEN`", "`Qwen3`"] {
        assert!(ran.stderr.contains(part), "{part}: {ran:?}");
    }
    Ok(())
}

#[tokio::test]
async fn secrets_of_a_configuration_are_shown_to_whoever_asks_for_them_only() -> Outcome {
    let env = format!("defaults.env = {{ HF_TOKEN = \"hush\", HARMLESS = \"{TOKEN}\" }}");
    let setup = Setup::new()?.top(&env).fake("m", &json!({}), "args = [\"--api-key\", \"shh\"]\n")?;
    setup.home.file("warden.toml", setup.config())?;
    let shown = setup.home.warden(["config", "show", "warden.toml"], SOON).await?;
    assert!(shown.code == 0 && shown.stdout.contains("--reveal"), "{shown:?}");
    assert!(!["hush", TOKEN, "shh"].iter().any(|secret| shown.all().contains(secret)), "{shown:?}");
    let shown = setup.home.warden(["config", "show", "warden.toml", "--reveal"], SOON).await?;
    assert!(["hush", TOKEN, "shh"].iter().all(|secret| shown.stdout.contains(secret)), "{shown:?}");
    for directory in ["state_dir", "data_dir", "cache_dir"] {
        assert!(shown.stdout.contains(&format!("\n{directory} = \"/")), "{directory}: {shown:?}");
    }
    Ok(())
}

#[tokio::test]
async fn settings_that_contradict_each_other_are_named_with_the_numbers() -> Outcome {
    let keys = "args = [\"--cache-ram\", \"4096\", \"-np\", \"8\"]\nmax_in_flight = 10\npolicy.host.soft = \"2GiB\"\n\
                policy.vram.hard = 12\npolicy.max_age = \"1m\"\n";
    let setup = Setup::new()?.top("server.body_bytes = \"1GiB\"").fake("m", &json!({}), keys)?;
    setup.home.file("warden.toml", setup.config())?;
    let ran = setup.home.warden(["config", "check", "warden.toml"], SOON).await?;
    assert_eq!(ran.code, 0, "{ran:?}");
    for part in [
        "2.0 GiB is below the prompt cache, which may grow to 4.0 GiB",
        "`max_in_flight` is 10, and a process has 8 slots",
        "a budget of 12 B",
        "`max_age` is 1 min, and replacements are at least 10 min apart",
        "allows bodies of 1.0 GiB, and `server.buffered_bytes` holds 256.0 MiB",
    ] {
        assert!(ran.stderr.contains(part), "{part}: {ran:?}");
    }
    Ok(())
}

#[tokio::test]
async fn a_flag_that_the_llama_server_does_not_have_is_named_with_the_nearest_one() -> Outcome {
    let home = Home::new()?;
    home.file("m.gguf", "")?;
    let flags: String = (0..30)
        .flat_map(|number| [format!("-x{number}, --flag-{number} N    something"), "\n".to_owned()])
        .collect();
    let script = format!(
        "#!/bin/sh\ncase $1 in\n--version) echo 'version: 1 (abc)';;\n--help) cat <<'EOF'\n-m, --model FNAME  a file\n-c, \
         --ctx-size N  tokens\n{flags}EOF\n;;\nesac\n"
    );
    let server = home.file("llama-server", script)?;
    std::fs::set_permissions(&server, std::fs::Permissions::from_mode(0o755))?;
    for (args, code) in
        [("\"-c\", \"1\", \"--ctx_size\", \"2\"", 0), ("\"-c\", \"1\",\n  \"--ctx-sice\", \"2\"", 2)]
    {
        let text =
            format!("[models.a]\nmodel = \"m.gguf\"\nbinary = \"{}\"\nargs = [{args}]\n", server.display());
        home.file("warden.toml", text)?;
        let ran = home.warden(["config", "check", "warden.toml"], SOON).await?;
        assert_eq!(ran.code, code, "{args}: {ran:?}");
        if code != 0 {
            for part in ["warden.toml:5", "has no flag `--ctx-sice`", "the nearest is `--ctx-size`"] {
                assert!(ran.stderr.contains(part), "{part}: {ran:?}");
            }
        }
    }
    Ok(())
}
