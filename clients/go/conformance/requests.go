package main

import (
	"strconv"
	"strings"

	"google.golang.org/protobuf/types/known/durationpb"

	mlxstream "github.com/mlx-stream/mlx-stream/clients/go"
	v1 "github.com/mlx-stream/mlx-stream/clients/go/v1"
)

type prompt struct {
	Text     string   `json:"text"`
	Filler   int      `json:"filler_bytes"`
	Tokens   []uint32 `json:"tokens"`
	Messages []struct {
		Role    string `json:"role"`
		Content string `json:"content"`
	} `json:"messages"`
}

type options struct {
	MaxTokens     *uint32  `json:"max_tokens"`
	Temperature   *float64 `json:"temperature"`
	TopP          *float64 `json:"top_p"`
	TopK          *uint32  `json:"top_k"`
	Seed          *string  `json:"seed"`
	StopSequences []string `json:"stop_sequences"`
	Logprobs      *bool    `json:"logprobs"`
	TopLogprobs   *uint32  `json:"top_logprobs"`
}

type delivery struct {
	HeartbeatSeconds    *float64 `json:"heartbeat_seconds"`
	MaxDelaySeconds     *float64 `json:"max_delay_seconds"`
	MaxTokensPerMessage *uint32  `json:"max_tokens_per_message"`
	IncludeText         *bool    `json:"include_text"`
	IncludeTokenBytes   bool     `json:"include_token_bytes"`
	DraftBlocks         bool     `json:"draft_blocks"`
	Durable             bool     `json:"durable"`
	DeadlinePolicy      any      `json:"deadline_policy"`
}

func (r request) built() *v1.GenerateRequest {
	built := &v1.GenerateRequest{
		Options:   r.Options.built(),
		Delivery:  r.Delivery.built(),
		Model:     r.Model,
		RequestId: r.RequestID,
	}
	switch {
	case len(r.Prompt.Messages) > 0:
		var turns []*v1.ChatMessage
		for _, turn := range r.Prompt.Messages {
			turns = append(turns, mlxstream.Message(turn.Role, turn.Content))
		}
		built.Prompt = mlxstream.Chat(turns...)
	case len(r.Prompt.Tokens) > 0:
		built.Prompt = mlxstream.Tokens(r.Prompt.Tokens...)
	default:
		built.Prompt = mlxstream.Text(r.Prompt.Text + strings.Repeat("x", r.Prompt.Filler))
	}
	return built
}

func (o options) built() *v1.GenerateOptions {
	built := &v1.GenerateOptions{
		MaxTokens:     o.MaxTokens,
		Temperature:   o.Temperature,
		TopP:          o.TopP,
		TopK:          o.TopK,
		StopSequences: o.StopSequences,
		Logprobs:      o.Logprobs,
		TopLogprobs:   o.TopLogprobs,
	}
	if o.Seed != nil {
		if seed, err := strconv.ParseUint(*o.Seed, 10, 64); err == nil {
			built.Seed = &seed
		}
	}
	return built
}

func (d delivery) built() *v1.DeliveryOptions {
	built := &v1.DeliveryOptions{
		MaxTokensPerMessage: d.MaxTokensPerMessage,
		IncludeText:         d.IncludeText,
		IncludeTokenBytes:   d.IncludeTokenBytes,
		DraftBlocks:         d.DraftBlocks,
		Durable:             d.Durable,
	}
	if d.HeartbeatSeconds != nil {
		built.HeartbeatInterval = durationpb.New(seconds(*d.HeartbeatSeconds))
	}
	if d.MaxDelaySeconds != nil {
		built.MaxDelay = durationpb.New(seconds(*d.MaxDelaySeconds))
	}
	switch policy := d.DeadlinePolicy.(type) {
	case float64:
		built.DeadlinePolicy = v1.DeadlinePolicy(int32(policy))
	case string:
		built.DeadlinePolicy = v1.DeadlinePolicy(v1.DeadlinePolicy_value["DEADLINE_POLICY_"+strings.ToUpper(policy)])
	}
	return built
}
