//! The book predicts llama.cpp's allocations for known models, and places no model without room.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::sample::GpuIndex;
use crate::units::as_f64;

const GIB: u64 = 1 << 30;

fn file(architecture: &str, numbers: &[(&str, &[f64])], words: u64) -> GgufDescription {
    let key = |name: &str| format!("{architecture}.{name}");
    GgufDescription {
        architecture: architecture.to_owned(),
        numbers: numbers.iter().map(|(name, values)| (key(name), values.to_vec())).collect(),
        lengths: [("tokenizer.ggml.tokens".to_owned(), words)].into(),
        tensors: Vec::new(),
    }
}

/// An 8B model: 32 layers, 8 heads of 128 for keys and values.
fn eight_billion() -> GgufDescription {
    let mut of = file(
        "llama",
        &[
            ("block_count", &[32.0]),
            ("embedding_length", &[4096.0]),
            ("feed_forward_length", &[14336.0]),
            ("attention.head_count", &[32.0]),
            ("attention.head_count_kv", &[8.0]),
            ("context_length", &[131_072.0]),
        ],
        128_256,
    );
    of.tensors = (0..32).map(|layer| (format!("blk.{layer}.ffn_up.weight"), 130 * MIB)).collect();
    of.tensors.push(("token_embd.weight".to_owned(), 280 * MIB));
    of.tensors.push(("output.weight".to_owned(), 410 * MIB));
    of
}

fn run(words: &str) -> ServerRun {
    let args: Vec<String> = words.split_whitespace().map(str::to_owned).collect();
    ServerRun::from_command(&args, &BTreeMap::new())
}

fn needs(shape: &ModelShape, run: &ServerRun, has_gpu: bool, projector: u64) -> MemoryNeeds {
    predict_needs(shape, run, ServerBuild::newest(has_gpu), projector)
}

fn of(side: &[(NeedPurpose, u64)], part: NeedPurpose) -> u64 {
    side.iter().find(|(known, _)| *known == part).map_or(0, |(_, bytes)| *bytes)
}

#[test]
fn the_cache_of_a_dense_model_is_what_llama_cpp_says_at_its_start() {
    let shape = ModelShape::from_file(&eight_billion()).unwrap();
    let cache = |words: &str| of(&needs(&shape, &run(words), true, 0).gpu, NeedPurpose::Cache);
    assert_eq!(cache("-c 8192 -np 1"), GIB, "llama_kv_cache: size = 1024.00 MiB (8192 cells, 32 layers)");
    assert_eq!(cache("-c 8192 -np 4"), GIB);
    assert_eq!(cache("-c 8192 -np 1 -ctk q8_0 -ctv q8_0"), 544 * MIB, "size = 544.00 MiB");
    assert_eq!(cache("-c 8192 -np 1 -ctk q4_0 -ctv q4_0"), 288 * MIB);
    assert_eq!(cache("-c 1000 -np 3 -no-kvu"), 3 * 512 * 131_072, "each slot has a multiple of 256");
    assert_eq!(cache("-np 1"), 16 * GIB, "as long as it was made for");
    let halved = needs(&shape, &run("-c 8192 -np 1 -ngl 17"), true, 0);
    assert_eq!(
        (of(&halved.gpu, NeedPurpose::Cache), of(&halved.host, NeedPurpose::Cache)),
        (GIB / 2, GIB / 2)
    );
    let kept = needs(&shape, &run("-c 8192 -np 1 -nkvo"), true, 0);
    assert_eq!((of(&kept.gpu, NeedPurpose::Cache), of(&kept.host, NeedPurpose::Cache)), (0, GIB));
}

#[test]
fn weights_are_where_their_layers_are() {
    let shape = ModelShape::from_file(&eight_billion()).unwrap();
    let weights = |words: &str| {
        let needs = needs(&shape, &run(words), true, 0);
        (
            of(&needs.gpu, NeedPurpose::Weights) / MIB,
            needs.mapped / MIB,
            of(&needs.host, NeedPurpose::Weights) / MIB,
        )
    };
    assert_eq!(weights("-c 4096"), (32 * 130 + 410, 280, 0));
    assert_eq!(weights("-c 4096 -ngl 99 --no-mmap"), (32 * 130 + 410, 0, 280));
    assert_eq!(weights("-c 4096 -ngl 99 -lm none"), (32 * 130 + 410, 0, 280), "the same in newer builds");
    assert_eq!(weights("-c 4096 -ngl 1"), (410, 280 + 32 * 130, 0), "the output is the last layer");
    assert_eq!(weights("-c 4096 -ngl 0"), (0, 280 + 410 + 32 * 130, 0));
    let without = needs(&shape, &run("-c 4096"), false, 100 * MIB);
    assert!(!without.uses_gpu() && without.gpu_bytes(1) == 0);
    assert_eq!(of(&without.host, NeedPurpose::Projector), 100 * MIB);
    // A model with tied embeddings needs the tensor twice if input and output are on different devices.
    let mut tied = eight_billion();
    tied.tensors.pop();
    let tied = ModelShape::from_file(&tied).unwrap();
    assert_eq!(of(&needs(&tied, &run("-c 4096"), true, 0).gpu, NeedPurpose::Weights) / MIB, 32 * 130 + 280);
}

#[test]
fn experts_stay_on_the_host_where_that_is_wished() {
    let mut described = eight_billion();
    for layer in 0..32 {
        described.tensors.push((format!("blk.{layer}.ffn_up_exps.weight"), 500 * MIB));
    }
    let shape = ModelShape::from_file(&described).unwrap();
    let on_gpu = |words: &str| of(&needs(&shape, &run(words), true, 0).gpu, NeedPurpose::Weights) / MIB;
    assert_eq!(on_gpu("-c 4096"), 32 * 630 + 410);
    assert_eq!(on_gpu("-c 4096 --n-cpu-moe 12"), 32 * 630 + 410 - 12 * 500);
    assert_eq!(on_gpu("-c 4096 --cpu-moe"), 32 * 130 + 410);
}

#[test]
fn windows_recurrence_and_shared_layers_keep_less() {
    let mut gemma = file(
        "gemma3",
        &[
            ("block_count", &[12.0]),
            ("embedding_length", &[2048.0]),
            ("attention.head_count", &[8.0]),
            ("attention.head_count_kv", &[4.0]),
            ("attention.key_length", &[256.0]),
            ("attention.value_length", &[256.0]),
            ("attention.sliding_window", &[1024.0]),
        ],
        262_144,
    );
    let cells = |described: &GgufDescription, words: &str| {
        let shape = ModelShape::from_file(described).unwrap();
        of(&needs(&shape, &run(words), false, 0).host, NeedPurpose::Cache) / (2 * 2 * 1024)
    };
    // Two layers cache the whole context, ten their window and one micro-batch.
    assert_eq!(cells(&gemma, "-c 32768 -np 1"), 2 * 32_768 + 10 * 1536);
    assert_eq!(cells(&gemma, "-c 32768 -np 4"), 2 * 32_768 + 10 * 4 * 1536);
    assert_eq!(cells(&gemma, "-c 32768"), 2 * 32_768 + 10 * (4 * 1024 + 512));
    assert_eq!(cells(&gemma, "-c 32768 -np 1 --swa-full"), 12 * 32_768);
    gemma.numbers.insert("gemma3.attention.shared_kv_layers".to_owned(), vec![6.0]);
    assert_eq!(cells(&gemma, "-c 32768 -np 1"), 32_768 + 5 * 1536);

    let hybrid = file(
        "qwen3next",
        &[
            ("block_count", &[8.0]),
            ("embedding_length", &[2048.0]),
            ("attention.head_count", &[16.0]),
            ("attention.head_count_kv", &[2.0]),
            ("attention.key_length", &[256.0]),
            ("attention.value_length", &[256.0]),
            ("full_attention_interval", &[4.0]),
            ("ssm.conv_kernel", &[4.0]),
            ("ssm.inner_size", &[4096.0]),
            ("ssm.state_size", &[128.0]),
            ("ssm.group_count", &[16.0]),
        ],
        1000,
    );
    let shape = ModelShape::from_file(&hybrid).unwrap();
    let needs = needs(&shape, &run("-c 4096 -np 2"), false, 0);
    assert_eq!(of(&needs.host, NeedPurpose::Cache), 2 * 4096 * 2 * 1024);
    assert_eq!(of(&needs.host, NeedPurpose::State), 6 * 2 * 4 * (3 * (4096 + 2 * 16 * 128) + 128 * 4096));
}

#[test]
fn a_file_that_lacks_what_all_have_is_told_in_words() {
    assert!(ModelShape::from_file(&GgufDescription::default()).unwrap_err().contains("general.architecture"));
    let none = file("llama", &[("embedding_length", &[64.0])], 0);
    assert!(ModelShape::from_file(&none).unwrap_err().contains("llama.block_count"));
}

#[test]
fn flags_are_read_as_llama_server_reads_them() {
    let told = run(
        "--ctx_size 8192 -c 4096 --parallel 2 -ub 256 -ngl all -fa off -ctk q4_1 -ts 3,1 -md draft.gguf -ctv q9",
    );
    assert_eq!((told.context, told.slots, told.ubatch), (Some(4096), Some(2), Some(256)));
    assert_eq!(
        (told.gpus.layers, told.flash, told.cache.key_type),
        (Some(GpuLayers::All), Some(false), CacheType::Q4(20))
    );
    assert_eq!(
        (told.gpus.shares, told.unknown),
        (vec![3.0, 1.0], vec!["-md".to_owned(), "--cache-type-v q9".to_owned()])
    );
    let env = [("LLAMA_ARG_CTX_SIZE", "2048"), ("LLAMA_ARG_N_GPU_LAYERS", "7"), ("LLAMA_ARG_SWA_FULL", "1")];
    let env = env.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
    let told = ServerRun::from_command(&[], &env);
    assert_eq!(
        (told.context, told.gpus.layers, told.cache.whole_windows),
        (Some(2048), Some(GpuLayers::Last(7)), true)
    );
    assert_eq!(run("-c 0 -np -1"), ServerRun::default());
}

fn wanted(name: &str, gib: u64) -> PlacementRequest {
    let needs = MemoryNeeds {
        gpu: vec![(NeedPurpose::Weights, gib * GIB)],
        each_gpu: GIB / 2,
        ..MemoryNeeds::default()
    };
    PlacementRequest { name: name.to_owned(), needs, gpus: Vec::new(), may_split: true }
}

fn machine(gpus: &[u64]) -> MachineCapacity {
    MachineCapacity { host: 64 * GIB, gpus: gpus.iter().map(|gib| gib * GIB).collect() }
}

#[test]
fn one_gpu_is_preferred_pins_hold_and_the_large_ones_are_spread() {
    let places = |machine: &MachineCapacity, all: &[PlacementRequest]| {
        let all: Vec<&PlacementRequest> = all.iter().collect();
        fit_models(machine, &all).map(|mut fits| {
            fits.sort_by(|a, b| a.name.cmp(&b.name));
            fits.into_iter()
                .map(|fit| fit.gpus.iter().map(|(gpu, _)| *gpu).collect::<Vec<_>>())
                .collect::<Vec<_>>()
        })
    };
    let two = machine(&[24, 24]);
    assert_eq!(places(&two, &[wanted("a", 20), wanted("b", 20)]), Ok(vec![vec![0], vec![1]]));
    assert_eq!(places(&two, &[wanted("a", 40)]), Ok(vec![vec![0, 1]]));
    let pinned = PlacementRequest { gpus: vec![0], ..wanted("b", 20) };
    assert_eq!(places(&two, &[wanted("a", 20), pinned.clone()]), Ok(vec![vec![1], vec![0]]));
    // The larger model would take the only allowed GPU of the pinned one.
    assert_eq!(places(&machine(&[24, 12]), &[wanted("a", 9), pinned]), Ok(vec![vec![1], vec![0]]));
    let whole = PlacementRequest { may_split: false, ..wanted("a", 40) };
    assert_eq!(
        places(&two, &[whole]),
        Err(FitError::Gpu { name: "a".to_owned(), needed: 40 * GIB + GIB / 2, left: 24 * GIB })
    );
    let three = [wanted("a", 14), wanted("b", 14), wanted("c", 19)];
    assert!(
        matches!(places(&two, &three), Err(FitError::Gpu { .. })),
        "48.5 GiB and the second context are more than 48"
    );
    let host = MemoryNeeds { host: vec![(NeedPurpose::Cache, 65 * GIB)], ..MemoryNeeds::default() };
    let host = PlacementRequest { name: "h".to_owned(), needs: host, gpus: Vec::new(), may_split: true };
    assert_eq!(places(&two, &[host]), Err(FitError::Host { needed: 65 * GIB, there: 64 * GIB }));
}

proptest! {
    #[test]
    fn nobody_is_placed_where_there_is_no_room(
        gpus in proptest::collection::vec(1_u64..48, 0..5),
        models in proptest::collection::vec((1_u64..40, any::<bool>(), proptest::option::of(0_usize..5)), 0..6),
    ) {
        let machine = machine(&gpus);
        let all: Vec<PlacementRequest> = models.iter().enumerate().map(|(index, (gib, may_split, pin))| PlacementRequest {
            gpus: pin.iter().copied().collect(),
            may_split: *may_split,
            ..wanted(&format!("m{index}"), *gib)
        }).collect();
        let all: Vec<&PlacementRequest> = all.iter().collect();
        if let Ok(fits) = fit_models(&machine, &all) {
            prop_assert_eq!(fits.len(), all.len());
            for (gpu, room) in machine.gpus.iter().enumerate() {
                let taken: u64 = fits.iter().flat_map(|fit| &fit.gpus).filter(|(at, _)| *at == gpu).map(|(_, bytes)| bytes).sum();
                prop_assert!(taken <= *room, "GPU {gpu}: {taken} of {room}: {fits:?}");
            }
            for fit in &fits {
                let one = all.iter().find(|one| one.name == fit.name).unwrap();
                let held: u64 = fit.gpus.iter().map(|(_, bytes)| bytes).sum();
                prop_assert!(as_f64(held) >= as_f64(one.needs.gpu_bytes(fit.gpus.len() as u64)) * 0.999);
                prop_assert!(fit.gpus.len() == 1 || one.may_split);
                prop_assert!(fit.gpus.iter().all(|(gpu, _)| one.gpus.is_empty() || one.gpus.contains(gpu)));
            }
        }
    }

    #[test]
    fn more_context_slots_or_layers_never_need_less(context in 256_u64..65_536, slots in 1_u64..8, layers in 0_u64..34) {
        let shape = ModelShape::from_file(&eight_billion()).unwrap();
        let total = |context: u64, slots: u64, layers: u64| {
            let needs = needs(&shape, &run(&format!("-c {context} -np {slots} -ngl {layers}")), true, 0);
            (needs.host_bytes() + needs.mapped + needs.gpu_bytes(1), needs.gpu_bytes(1))
        };
        let (all, gpu) = total(context, slots, layers);
        prop_assert!(total(context + 256 * slots, slots, layers).0 >= all);
        prop_assert!(total(context, slots, layers + 1).1 >= gpu);
    }
}

#[test]
fn what_was_measured_counts_in_the_place_of_what_was_planned() {
    let gpu = |index: u32| MemoryKind::Vram(GpuIndex(index));
    let held = |series, most| HeldMemory { series, ready: most / 2, most };
    let planned = MemoryNeeds {
        host: vec![(NeedPurpose::Fixed, 100)],
        gpu: vec![(NeedPurpose::Weights, 1000)],
        each_gpu: 50,
        ..MemoryNeeds::default()
    };
    assert_eq!((planned.host_bytes(), planned.gpu_bytes(1), planned.gpu_bytes(2)), (100, 1050, 1100));
    let seen = [held(MemoryKind::Host, 90), held(gpu(0), 700), held(gpu(1), 300)];
    let measured = MeasuredNeeds::from_held(&seen);
    assert_eq!(measured, MeasuredNeeds { host: Some(90), gpu: Some((1000, 2)) });
    let needs = MemoryNeeds { measured, ..planned.clone() };
    assert_eq!((needs.host_bytes(), needs.gpu_bytes(2), needs.gpu_bytes(3)), (90, 1000, 1050));
    assert_eq!((needs.planned_host(), needs.planned_gpu(2)), (100, 1100));
    // Without a reading, the GPU needs are as planned.
    let host_only = MemoryNeeds { measured: MeasuredNeeds::from_held(&seen[..1]), ..planned };
    assert_eq!((host_only.host_bytes(), host_only.gpu_bytes(1)), (90, 1050));
    // Measured less than a GPU's context: no number may become negative.
    let tiny = MemoryNeeds { measured: MeasuredNeeds { host: None, gpu: Some((10, 1)) }, ..needs };
    let wanted = PlacementRequest { name: "m".to_owned(), needs: tiny, gpus: Vec::new(), may_split: true };
    assert!(fit_models(&MachineCapacity { host: 1000, gpus: vec![5, 5] }, &[&wanted]).is_err());
}

/// Gemma 3 270M: a large vocabulary, three layers with full attention and fifteen with a window of 512.
fn gemma_270m() -> ModelShape {
    let mut described = file(
        "gemma3",
        &[
            ("block_count", &[18.0]),
            ("embedding_length", &[640.0]),
            ("feed_forward_length", &[2048.0]),
            ("attention.head_count", &[4.0]),
            ("attention.head_count_kv", &[1.0]),
            ("attention.key_length", &[256.0]),
            ("attention.value_length", &[256.0]),
            ("attention.sliding_window", &[512.0]),
            ("context_length", &[32_768.0]),
        ],
        262_144,
    );
    described.tensors.push(("token_embd.weight".to_owned(), 170 * MIB));
    ModelShape::from_file(&described).unwrap()
}

#[test]
fn a_vocabulary_is_reserved_for_each_token_by_old_builds_and_touched_for_each_slot() {
    let shape = gemma_270m();
    let old = |has_gpu| ServerBuild { number: Some(8827), ..ServerBuild::newest(has_gpu) };
    let host = |server| predict_needs(&shape, &run("-c 8192 -np 1"), server, 0);
    let (newest, older) = (host(ServerBuild::newest(false)), host(old(false)));
    // llama-server logs "CPU compute buffer size = 26.77 MiB", and its output buffer has 1.00 MiB.
    let touched = of(&newest.host, NeedPurpose::Computing);
    assert!((22 * MIB..30 * MIB).contains(&touched), "{touched}");
    assert_eq!(
        touched,
        of(&older.host, NeedPurpose::Computing),
        "what is never touched is no need of the host"
    );
    assert_eq!(newest.untouched, 0);
    let of_archive = ServerBuild { number: Some(0), ..ServerBuild::newest(false) };
    assert_eq!(host(of_archive), newest, "an archive without a history has no number that says its age");
    assert!(older.untouched > 480 * MIB, "{}", older.untouched);
    // A GPU allocates all reserved bytes.
    let vocabulary = 4 * 512 * (262_144 + 640);
    assert_eq!(of(&host(old(true)).gpu, NeedPurpose::Computing), vocabulary);
    assert!(of(&host(ServerBuild::newest(true)).gpu, NeedPurpose::Computing) < 30 * MIB);
    assert_eq!(host(old(true)).untouched, 0);
    // An embedding request reads the output of each token.
    for flag in ["--embeddings", "--reranking", "--pooling mean"] {
        let needs = needs(&shape, &run(&format!("-c 8192 -np 1 {flag}")), false, 0);
        assert!(of(&needs.host, NeedPurpose::Computing) >= vocabulary && needs.untouched == 0, "{flag}");
    }
    assert_eq!(run("--pooling none").outputs, OutputDemand::LastToken);
}

#[test]
fn a_real_process_of_each_kind_of_vocabulary_holds_what_is_fixed() {
    let fixed = |words: u64, merges: u64| {
        let shape = ModelShape { vocabulary: words, merges, ..gemma_270m() };
        of(&needs(&shape, &run("-c 512"), false, 0).host, NeedPurpose::Fixed) / MIB
    };
    // Measured after prompts: 57 MiB for Gemma 3 270M, 24 MiB for SmolLM2-135M.
    assert!(fixed(262_144, 0).abs_diff(57) <= 8);
    assert!(fixed(49_152, 48_900).abs_diff(24) <= 12);
}

#[test]
fn flash_attention_on_cuda_copies_what_a_cache_has_in_another_type() {
    let mut described = file(
        "llama",
        &[
            ("block_count", &[2.0]),
            ("embedding_length", &[2048.0]),
            ("attention.head_count", &[16.0]),
            ("attention.head_count_kv", &[16.0]),
        ],
        1000,
    );
    described.tensors.push(("output.weight".to_owned(), MIB));
    let shape = ModelShape::from_file(&described).unwrap();
    let computing = |words: &str, server| {
        let needs = predict_needs(&shape, &run(&format!("-c 131072 -np 1 {words}")), server, 0);
        (of(&needs.gpu, NeedPurpose::Computing), of(&needs.host, NeedPurpose::Computing))
    };
    let newest = ServerBuild::newest(true);
    let plain = computing("-fa on", newest);
    let more = |words: &str, server| computing(words, server).0 - computing("-fa on", server).0;
    // 16 heads of 128 for 131,072 tokens in two bytes: 512 MiB each for keys and values, reusing the memory
    // of the feed-forward buffers.
    let inner = 4 * 512 * 3 * 8192;
    let both = more("-fa on -ctk q8_0 -ctv q8_0", newest);
    assert_eq!(both, GIB - inner);
    assert_eq!(more("-ctk q4_0 -ctv q4_0", newest), both, "flash attention is on where nothing is said");
    assert_eq!(more("-fa on -ctk q8_0", newest), GIB / 2 - inner);
    assert_eq!(more("-fa on -ctv bf16", newest), GIB / 2 - inner);
    assert_eq!(more("-fa on -ctk q8_0 -ctv q8_0 -np 4 -no-kvu", newest), both, "of all slots together");
    // Before b9489 the pool holds the copies, in addition to the buffers.
    let older = ServerBuild { number: Some(9488), ..newest };
    assert_eq!(more("-fa on -ctk q8_0 -ctv q8_0", older), GIB);
    // Other backends make no copies.
    assert_eq!(more("-fa on -ctk q8_0 -ctv q8_0", ServerBuild { is_cuda: false, ..newest }), 0);
    assert_eq!(more("-fa on -ctk q8_0 -ctv q8_0 -nkvo", newest), 0);
    let without = |words: &str| computing(words, ServerBuild::newest(false));
    assert_eq!(without("-fa on -ctk q8_0 -ctv q8_0"), without("-fa on"));
    assert_eq!(plain.1, computing("-fa on -ctk q8_0 -ctv q8_0", newest).1, "none of it on the host");
    let off = computing("-fa off", newest);
    assert_eq!(off, computing("-fa off -ctk q8_0", newest));
    // Only the layer with the largest cache counts: windowed layers keep less.
    let gemma = gemma_270m();
    let of_gemma = |words: &str| {
        of(&needs(&gemma, &run(&format!("-c 1048576 -np 1 {words}")), true, 0).gpu, NeedPurpose::Computing)
    };
    let inner = 4 * 512 * 3 * 2048;
    assert_eq!(of_gemma("-ctk q8_0 -ctv q8_0") - of_gemma(""), 1_048_576 * 2 * 256 * 2 - inner);
}

#[test]
fn each_gpu_has_buffers_of_its_own() {
    let needs = MemoryNeeds {
        gpu: vec![(NeedPurpose::Weights, 40 * GIB), (NeedPurpose::Computing, GIB)],
        each_gpu: GIB / 2,
        ..MemoryNeeds::default()
    };
    assert_eq!(needs.gpu_bytes(1), 41 * GIB + GIB / 2);
    assert_eq!(needs.gpu_bytes(2), 43 * GIB);
    let wanted = PlacementRequest { name: "m".to_owned(), needs, gpus: Vec::new(), may_split: true };
    assert!(fit_models(&machine(&[22, 22]), &[&wanted]).is_ok());
    assert!(fit_models(&machine(&[22, 20]), &[&wanted]).is_err(), "42 GiB are less than 43");
}

#[test]
fn what_fills_up_later_is_told_beside_the_needs() {
    let later =
        |shape: &ModelShape, words: &str| LaterMemory::estimate(shape, &run(words), Some(8 * GIB), 32);
    let dense = later(&ModelShape::from_file(&eight_billion()).unwrap(), "-c 8192");
    assert_eq!((dense.checkpoint_bytes(), dense.bytes()), (0, Some(8 * GIB)), "it can be cut anywhere");
    // llama-server logs "created context checkpoint 1 of 32 (…, size = 7.506 MiB)".
    let gemma = later(&gemma_270m(), "-c 8192 -np 4");
    assert_eq!((gemma.checkpoint, gemma.checkpoints), (512 * 15 * 2 * 256 * 2, 4 * 32));
    assert_eq!(gemma.bytes(), Some(8 * GIB + 128 * 7680 * 1024));
    assert_eq!(later(&gemma_270m(), "-c 8192 -np 1 --swa-full").checkpoint_bytes(), 0);
    assert_eq!(
        later(&gemma_270m(), "-c 256 -np 1").checkpoint,
        256 * 15 * 2 * 256 * 2,
        "no more than the context"
    );
    assert_eq!(LaterMemory { prompt_cache: None, ..gemma }.bytes(), None, "without a bound");
    let recurrent = ModelShape {
        layers: vec![LayerShape { state: 1000, ..LayerShape::default() }; 3],
        ..ModelShape::default()
    };
    assert_eq!(later(&recurrent, "-np 2 -c 512").checkpoint_bytes(), 3 * 4000 * 2 * 32);
}
