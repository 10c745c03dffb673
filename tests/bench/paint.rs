//! Measures how soon a browser shows the page of an instance with 50 models, over loopback.
//!
//! `cargo bench -p warden-tests --bench paint`: headless chromium loads the overview
//! (`PerformancePaintTiming`) in new contexts, then repeatedly in one context, alternating with a page of one
//! word from another server, which shows the browser's own time. There is no verdict: the figures depend on
//! the machine and its load.

use serde_json::{Value, json};
use warden_rig::browser::Browser;
use warden_rig::warden::Setup;
use warden_rig::{Context as _, Trouble};

const MODELS: usize = 50;
const LOADED: usize = 3;
const ROUNDS: usize = 12;

async fn measured() -> Result<Option<Value>, Trouble> {
    let Some(browser) = Browser::here().await? else { return Ok(None) };
    let port = warden_rig::ports::free()?;
    let mut setup = Setup::new()?.top(&format!("admin.address = \"127.0.0.1:{port}\"\nlog.level = \"warn\""));
    for number in 0..MODELS {
        let lines = if number < LOADED { "policy.host.soft = \"1GiB\"\n" } else { "preload = false\n" };
        setup = setup.fake(&format!("org/model-{number:02}"), &json!({}), lines)?;
    }
    let warden = setup.start().await?;
    warden.until_ready(LOADED).await?;
    browser.paint(&format!("http://127.0.0.1:{port}"), ROUNDS).await.map(Some)
}

/// Returns the least, the median and the largest figure of a kind.
fn figures(all: &[Value], page: &str, name: &str, kept: bool) -> Result<[f64; 3], Trouble> {
    let own = all.iter().filter(|one| one["page"] == page && one["what"] == name && one["kept"] == kept);
    let mut values: Vec<f64> = own.filter_map(|one| one["value"].as_f64()).collect();
    values.sort_by(f64::total_cmp);
    let middle = *values.get(values.len() / 2).context("no figure")?;
    Ok([values[0], middle, values[values.len() - 1]])
}

#[expect(clippy::print_stdout, reason = "figures that somebody has asked for")]
fn main() -> Result<(), Trouble> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().context("runtime")?;
    let Some(all) = runtime.block_on(measured())? else { return Ok(()) };
    let all = all.as_array().context("no figures")?;
    println!("{MODELS} models, {ROUNDS} loads each             least   median     most");
    println!("(a word: a page of one word, from a server beside)");
    for (kept, what) in [(false, "nothing kept"), (true, "files kept")] {
        for (page, called) in [("page", "overview"), ("word", "a word")] {
            for (name, unit) in [
                ("first_byte", "ms"),
                ("document", "ms"),
                ("first_paint", "ms"),
                ("first_contentful_paint", "ms"),
                ("bytes", "B"),
            ] {
                let label = format!("{what}, {called}: {}, {unit}", name.replace('_', " "));
                let [least, middle, most] = figures(all, page, name, kept)?;
                println!("{label:<48} {least:>8.1} {middle:>8.1} {most:>8.1}");
            }
        }
        let middle = |page| figures(all, page, "first_contentful_paint", kept).map(|[_, middle, _]| middle);
        let (ours, word) = (middle("page")?, middle("word")?);
        println!("{what}: first contentful paint, overview / a word: {:.2}", ours / word);
    }
    Ok(())
}
