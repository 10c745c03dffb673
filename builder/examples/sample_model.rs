//! Writes a sample model: `cargo run -p warden-builder --example sample_model -- PRESET SEED FILE`.

use std::path::Path;

use warden_builder::sample_model::{self, Options, Preset};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [preset, seed, file] = arguments.as_slice() else {
        return Err("usage: sample_model PRESET SEED FILE".into());
    };
    let preset = Preset::from_name(preset).ok_or("no such preset")?;
    sample_model::write(Path::new(file), &Options { seed: seed.parse()?, preset })?;
    Ok(())
}
