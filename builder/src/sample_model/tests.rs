//! Properties of the sample model: reproducible bytes, a small file, atomic writes.

use std::fs;

use sha2::{Digest, Sha256};

use super::*;

fn hash(options: &SampleModelOptions) -> String {
    hex::encode(Sha256::digest(bytes(options)))
}

#[test]
fn the_default_model_has_these_bytes_on_every_platform() {
    assert_eq!(
        hash(&SampleModelOptions::default()),
        "8ce8323d50e928f22fd535f7ab86bf557c8b08cc0cf2ead350eb0e1b96f5fc7f"
    );
}

#[test]
fn another_seed_gives_another_model_of_the_same_size() {
    let (one, two) =
        (SampleModelOptions::default(), SampleModelOptions { seed: 2, ..SampleModelOptions::default() });
    assert_ne!(hash(&one), hash(&two));
    assert_eq!(bytes(&one).len(), bytes(&two).len());
}

#[test]
fn models_for_everyday_use_are_under_two_megabytes() {
    for preset in [
        SamplePreset::Chat,
        SamplePreset::Ends,
        SamplePreset::Plain,
        SamplePreset::Tools,
        SamplePreset::Mmproj,
    ] {
        let size = bytes(&SampleModelOptions { preset, ..SampleModelOptions::default() }).len();
        assert!(size < 2_000_000, "{}: {size} bytes", preset.name());
    }
}

#[test]
fn a_model_in_each_form_is_small_and_has_the_bytes_of_its_blocks() {
    for weights in WeightKind::ALL.into_iter().skip(1) {
        let options = SampleModelOptions { weights, ..SampleModelOptions::default() };
        let model = model_file(&options);
        // Matrices of 256 columns: two with a row per token, and seven for each of two layers.
        let rows = 2 * vocab::TOKEN_COUNT as u64 + 2 * (256 + 2 * 128 + 256 + 3 * 256);
        // Five norms stay f32.
        assert_eq!(model.tensor_bytes(), rows * weights.bytes(256) + 5 * 256 * 4, "{}", weights.name());
        let size = bytes(&options).len();
        assert!(size < 2_500_000, "{}: {size} bytes", weights.name());
    }
}

/// `serve` writes this model to measure a server, so a large peak would stay in its heap.
#[test]
fn a_model_of_many_layers_is_never_in_memory_as_a_whole() {
    let model =
        model_file(&SampleModelOptions { preset: SamplePreset::Slow, ..SampleModelOptions::default() });
    assert!(model.tensor_bytes() > 10_000_000, "{} bytes", model.tensor_bytes());
    assert!(model.held_bytes() < 100_000, "{} bytes", model.held_bytes());
}

#[test]
fn a_twin_has_the_numbers_that_are_read_from_the_form() {
    let folder = tempfile::tempdir().unwrap();
    let twin = folder.path().join("twin.gguf");
    for weights in [WeightKind::Q4_0, WeightKind::Q6K] {
        let options = SampleModelOptions { weights, ..SampleModelOptions::default() };
        write_twin(&twin, &options).unwrap();
        let all = fs::read(&twin).unwrap();
        let read_back = |name: &str, columns: u32, rows: usize| {
            let drawn =
                WeightSource { seed: 1, tokens: 0, width: 256 }.matrix(name, 256, columns, LAYER_GAIN);
            quant::decode(weights, &quant::encode(weights, &drawn[..rows * columns as usize]))
        };
        // The file contains the first rows of a matrix as drawn.
        let wanted: Vec<u8> =
            read_back("blk.1.ffn_up.weight", 256, 2).iter().flat_map(|number| number.to_le_bytes()).collect();
        assert!(memchr::memmem::find(&all, &wanted).is_some(), "{}", weights.name());
        assert!(String::from_utf8_lossy(&all[..4096]).contains(&format!("(chat, as {})", weights.name())));
    }
}

#[test]
fn names_of_forms_lead_back_to_them() {
    for kind in WeightKind::ALL {
        assert_eq!(WeightKind::from_name(kind.name()), Some(kind));
    }
    assert_eq!(WeightKind::from_name("q9"), None);
}

#[test]
fn names_of_presets_lead_back_to_them() {
    for (preset, name) in SamplePreset::NAMES {
        assert_eq!((preset.name(), SamplePreset::from_name(name)), (name, Some(preset)));
    }
    assert_eq!(SamplePreset::from_name("huge"), None);
}

#[test]
fn the_header_says_gguf_version_3_and_counts_what_follows() {
    let all = bytes(&SampleModelOptions::default());
    assert_eq!(all[..8], *b"GGUF\x03\0\0\0");
    // Three tensors of the model, and nine for each of three layers.
    assert_eq!(all[8..16], 30_u64.to_le_bytes());
    assert_eq!(all.len() % crate::gguf::ALIGNMENT, 0);
}

#[test]
fn writing_replaces_a_sample_model_and_leaves_nothing_beside_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    write(&path, &SampleModelOptions { seed: 7, ..SampleModelOptions::default() }).unwrap();
    write(&path, &SampleModelOptions::default()).unwrap();
    assert_eq!(fs::read(&path).unwrap(), bytes(&SampleModelOptions::default()));
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
}

#[test]
fn writing_into_a_missing_folder_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let failed = write(&folder.path().join("none/model.gguf"), &SampleModelOptions::default()).unwrap_err();
    assert_eq!(failed.kind(), io::ErrorKind::NotFound);
}

#[test]
fn a_file_that_is_no_sample_of_ours_is_never_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.gguf");
    for preset in [SamplePreset::Chat, SamplePreset::Tools, SamplePreset::Mmproj] {
        // The first write creates the file, the others replace a file of ours.
        write(&path, &SampleModelOptions { preset, ..SampleModelOptions::default() }).unwrap();
    }
    fs::write(&path, "GGUF and weights that took a month to train").unwrap();
    let error = write(&path, &SampleModelOptions::default()).unwrap_err().to_string();
    assert!(error.contains("no sample model"), "{error}");
    assert!(fs::read(&path).unwrap().ends_with(b"a month to train"));
    fs::write(&path, "").unwrap();
    write(&path, &SampleModelOptions::default()).unwrap();
}
