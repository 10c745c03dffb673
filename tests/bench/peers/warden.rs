//! llama-warden's configuration here: what a user has on is on.

use serde_json::json;
use warden_rig::Trouble;
use warden_rig::warden::Setup;

use crate::load::MODEL;

/// Its name in the tables; variants have their own.
pub(crate) const NAME: &str = "llama-warden";
/// The key of the client, the last of many.
pub(crate) const KEY: Option<&str> = Some("sk-the-key-of-the-benchmark");
/// Other keys in the file.
const OTHER_KEYS: usize = 20;

/// Two models, so that each request has to name one; the second one never starts. The log with a line for each request
/// goes to a file.
pub(crate) fn setup(mock: &str, slots: usize) -> Result<Setup, Trouble> {
    let setup = Setup::new()?.top("server.keys = \"keys.toml\"");
    setup.home.file("keys.toml", keys())?;
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

/// A file of keys as somebody has it who gives each of his users one, with limits that nobody meets here.
fn keys() -> String {
    use sha2::Digest as _;
    let section = |(name, key): (String, String)| {
        let hash = hex::encode(sha2::Sha256::digest(key.as_bytes()));
        format!("[{name}]\nsha256 = \"{hash}\"\nrate = \"1000000000/min\"\nconcurrency = 1000000\n")
    };
    let others = (0..OTHER_KEYS).map(|n| (format!("user-{n}"), format!("sk-key-of-user-{n}")));
    others.chain(KEY.map(|key| ("bench".to_owned(), key.to_owned()))).map(section).collect()
}
