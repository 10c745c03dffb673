//! Promise: results with sample models also hold for trained and quantised models.

use std::path::Path;

use serde_json::{Value, json};
use warden_rig::process::ProcessId;
use warden_rig::real::{Undisturbed, llama_server};
use warden_rig::real_weights;
use warden_rig::warden::SOON;
use warden_rig::{Context as _, Home, Outcome};

#[tokio::test]
async fn plan_knows_models_that_others_quantised() -> Outcome {
    let (Some(smollm2), Some(gemma3)) = (real_weights::smollm2().await?, real_weights::gemma3().await?)
    else {
        return Ok(());
    };
    let home = Home::new()?;
    let table = |name: &str, model: &Path| {
        format!(
            "[models.{name}]\nbinary = '/bin/true'\nmodel = '{}'\nargs = [\"-np\", \"1\"]\n",
            model.display()
        )
    };
    home.file("warden.toml", table("smollm2", &smollm2) + &table("gemma3", &gemma3))?;
    let ran = home.warden(["plan", "--config", "warden.toml", "--gpus", "none", "--json"], SOON).await?;
    let told: Value = serde_json::from_str(&ran.stdout).context(ran.all())?;
    let model = |name: &str| {
        let mut models = told["models"].as_array().into_iter().flatten();
        models.find(|model| model["name"] == name).cloned().unwrap_or_default()
    };
    for (name, file, context) in [("smollm2", &smollm2, 8192), ("gemma3", &gemma3, 32_768)] {
        let model = model(name);
        let bytes = std::fs::metadata(file)?.len();
        assert_eq!(model["context"], context, "{told}");
        // Except for vocabulary and metadata, the file consists of weights.
        let mapped = model["mapped_bytes"].as_u64().unwrap_or(0);
        assert!(mapped <= bytes && mapped + (16 << 20) > bytes, "{mapped} of {bytes}: {told}");
    }
    // 30 layers of 3 heads of 64 numbers, keys and values of 2 bytes.
    assert_eq!(model("smollm2")["host"]["cache"], json!(8192 * 30 * 3 * 64 * 2 * 2), "{told}");
    Ok(())
}

#[tokio::test]
async fn plan_knows_what_a_process_holds_after_its_longest_prompt() -> Outcome {
    const CONTEXT: usize = 2048;
    const MIB: u64 = 1 << 20;
    let (Some(smollm2), Some(gemma3)) = (real_weights::smollm2().await?, real_weights::gemma3().await?)
    else {
        return Ok(());
    };
    let home = Home::new()?;
    let server = llama_server().await?;
    let flags = ["-c", &CONTEXT.to_string(), "-np", "1"];
    for (name, file) in [("smollm2", &smollm2), ("gemma3", &gemma3)] {
        let table = format!(
            "[models.{name}]\nbinary = '{}'\nmodel = '{}'\nargs = {}\n",
            server.display(),
            file.display(),
            json!(flags)
        );
        home.file("warden.toml", table)?;
        let ran = home.warden(["plan", "--config", "warden.toml", "--gpus", "none", "--json"], SOON).await?;
        let told: Value = serde_json::from_str(&ran.stdout).context(ran.all())?;
        let planned = told["models"][0]["host_bytes"].as_u64().context("host_bytes")?;

        let real = Undisturbed::start_model(&server, file, &flags, &[]).await?;
        // No pair of neighbouring tokens repeats.
        let prompt: Vec<usize> = (0..CONTEXT - 8).map(|at| 300 + at * 7919 % 40_000).collect();
        let asked = json!({ "prompt": prompt, "n_predict": 2 });
        let answer = real.http.post("/completion", &asked).await?;
        assert!(answer.status.is_success(), "{}", answer.text());
        let held = ProcessId::of(real.kid.pid()).and_then(ProcessId::host_bytes).context("RssAnon")?;
        assert!(
            planned.abs_diff(held) <= held / 20 + 64 * MIB,
            "{name}: {} MiB planned, {} held: {told}",
            planned / MIB,
            held / MIB
        );
    }
    Ok(())
}
