//! llama-warden's configuration here: what a user has on is on.

use serde_json::json;
use warden_rig::Trouble;
use warden_rig::warden::Setup;

use crate::load::MODEL;

/// Its name in the tables; variants have their own.
pub(crate) const NAME: &str = "llama-warden";
/// The key of the client, where keys are asked for.
pub(crate) const KEY: Option<&str> = None;

/// Two models, so that each request has to name one; the second one never starts. The log with a line for each request
/// goes to a file.
pub(crate) fn setup(mock: &str, slots: usize) -> Result<Setup, Trouble> {
    let setup = Setup::new()?;
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
