//! llama-warden's configuration for the bench, with all usual functions.

use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;

use serde_json::json;
use sha2::{Digest as _, Sha256};
use warden_rig::Trouble;
use warden_rig::warden::Setup;

use crate::load::MODEL;

pub(crate) const NAME: &str = "llama-warden";
pub(crate) const KEY: &str = "sk-0123456789abcdef0123456789abcdef";

/// Configures 64 idle connections until the mock, an unknown binary, is measured. Older programs have a public
/// key for that.
pub(crate) fn connections(program: &Path) -> Result<String, Trouble> {
    let schema = Command::new(program).args(["config", "schema"]).output()?.stdout;
    let key = "upstream.idle_connections_unknown";
    let is_key = String::from_utf8_lossy(&schema).contains("idle_connections_unknown");
    Ok(if is_key { format!("{key}=64") } else { format!("internal.{key}=64") })
}

/// Two models, so that each request must name one (the second never starts); keys with high limits; a log
/// line per request.
pub(crate) fn setup(mock: &str, slots: usize, access: &Path) -> Result<Setup, Trouble> {
    let setup = base_setup(access)?;
    let model = setup.home.path().join("model.gguf").display().to_string();
    let lines = |preload: bool| {
        format!(
            "binary = {}\nmodel = {}\nargs = [\"-np\", \"{slots}\", \"--metrics\"]\nmax_in_flight = {slots}\npreload = {preload}\nenv = {{ MOCK_LLAMA_CPU = \"{}\" }}\n",
            json!(mock),
            json!(model),
            crate::machine::LOAD,
        )
    };
    Ok(setup.model(MODEL, &lines(true)).model("other", &lines(false)))
}

/// The same, with the mock as two remotes.
pub(crate) fn remote_setup(mock: SocketAddr, access: &Path) -> Result<Setup, Trouble> {
    let remote = |name: &str| format!("[remotes.{name}]\nurl = \"http://{mock}\"\n");
    Ok(base_setup(access)?.top(&(remote(MODEL) + &remote("other"))))
}

fn base_setup(access: &Path) -> Result<Setup, Trouble> {
    let setup = Setup::new()?;
    let hash = |key: &str| hex::encode(Sha256::digest(key.as_bytes()));
    // An operator might give each user a key.
    let other = |number: u32| format!("[user-{number}]\nsha256 = \"{}\"\n\n", hash(&format!("key {number}")));
    let others = (0..20).map(other).collect::<Vec<_>>().concat();
    let keys = format!(
        "{others}[bench]\nsha256 = \"{}\"\nmodels = [\"{MODEL}\"]\nrate = \"1000000/s\"\ntokens = \"1000000000/s\"\nconcurrency = 4096\n",
        hash(KEY),
    );
    let keys = setup.home.file("keys.toml", keys)?.display().to_string();
    let access = access.display().to_string();
    let top = format!("server.keys = {}\nlog.access = {}", json!(keys), json!(access));
    Ok(setup.top(&top))
}
