//! Promise: what holds with the sample models holds with models that were trained and quantised by others.

use std::path::Path;

use serde_json::{Value, json};
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
        // All but the vocabulary and the numbers of the file is weights.
        let mapped = model["mapped_bytes"].as_u64().unwrap_or(0);
        assert!(mapped <= bytes && mapped + (16 << 20) > bytes, "{mapped} of {bytes}: {told}");
    }
    // 30 layers of 3 heads of 64 numbers, keys and values of 2 bytes.
    assert_eq!(model("smollm2")["host"]["cache"], json!(8192 * 30 * 3 * 64 * 2 * 2), "{told}");
    Ok(())
}
