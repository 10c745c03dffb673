//! Memory of configured models that are never loaded.

use procfs::process::Process;
use serde_json::json;
use warden_rig::warden::{SOON, Setup, Warden};
use warden_rig::{Context as _, Outcome, Trouble, binaries, wait_until};

const FEW: usize = 50;
const MANY: usize = FEW + 1000;
/// Bytes for 1,000 more models, which take 21.6 to 22.4 MiB in a debug build; futures are smaller in a release build.
const MAX_GROWTH: u64 = 24 << 20;

/// Anonymous memory in bytes. Mapped pages of the program file do not count: they depend on the page cache.
fn anonymous(warden: &Warden) -> Result<u64, Trouble> {
    let process = Process::new(warden.kid.pid()).context("process")?;
    let rollup = process.smaps_rollup().context("smaps_rollup")?.memory_map_rollup;
    rollup
        .iter()
        .find_map(|map| map.extension.map.get("Anonymous").copied())
        .ok_or_else(|| Trouble::new("smaps_rollup does not tell `Anonymous`"))
}

/// Starts a warden with `count` unloaded models, each with arguments, a variable and settings of its own.
async fn with_models(count: usize) -> Result<Warden, Trouble> {
    let binary = binaries::fake_llama()?;
    let mut setup = Setup::new()?.top("child.measure = false");
    // The allocator returns freed memory at once. By default it keeps some MiB, which would hide the models'
    // memory.
    setup.home.env.insert("MIMALLOC_PURGE_DELAY".into(), "0".into());
    let file = setup.home.path().join("model.gguf");
    for number in 0..count {
        let lines = format!(
            "binary = {}\nmodel = {}\nargs = [\"-np\", \"4\", \"-c\", \"4096\", \"--metrics\"]\nttl = \"1h\"\nmax_in_flight = 4\nenv = {{ NUMBER = \"{number}\" }}\npreload = false",
            json!(binary),
            json!(file),
        );
        setup = setup.model(&format!("model-{number}"), &lines);
    }
    setup.start().await
}

#[tokio::test]
async fn a_thousand_models_that_were_never_loaded_cost_little_memory() -> Outcome {
    let few = with_models(FEW).await?;
    let many = with_models(MANY).await?;
    let listed = many.http.get("/v1/models").await?.json()?;
    assert_eq!(listed["data"].as_array().map(Vec::len), Some(MANY));
    let mut held = (0, 0);
    // The tasks of the models start in the background.
    let settled = wait_until("1,000 models cost less than 24 MiB", SOON, async || {
        let (Ok(few), Ok(many)) = (anonymous(&few), anonymous(&many)) else { return false };
        held = (few, many);
        many.saturating_sub(few) < MAX_GROWTH
    });
    settled.await.context(format!("bytes with {FEW} and with {MANY} models: {held:?}"))
}
